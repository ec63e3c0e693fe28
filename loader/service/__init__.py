"""One process of a machine reads for all others there, through shared memory.

A client connects to the service's socket, says what it wants (`protocol`), and is given a descriptor of shared memory: a page
of numbers that both sides read and write (`control`), and behind it the slabs (`slabs`). The service fills slabs ahead and
announces them in the control page; the client takes them from there, and says in a byte of the page when a slab is free again.
The socket then carries only wake-up bytes, and its end: whichever side dies, the other one is told by the kernel.
"""
