"""The service: one process reads for all others on a machine, through shared memory.

A client connects to the service's unix socket, sends a request (`protocol`), and receives a descriptor of shared memory: a
control page that both sides read and write (`control_page`), followed by the buffers (`shared_memory`). The service fills
buffers ahead and announces them in the control page. The client pops them, and frees a buffer by a byte of the page.
After the request, the socket carries only wake-up bytes. If either side dies, the kernel closes it, which tells the other.
"""
