"""The service: one process reads for all others on a machine, through shared memory, and for other machines, over TCP.

A client connects, proves that it may (`tokens`), and sends one message, which is answered by one (`wire`). The service sends
the manifests of its stores, so the client makes the plan; what it then requests are batches of that plan from a position on.
Over a unix socket (`sockets`) the answer has a descriptor of shared memory: a control page that both sides read and write
(`control_page`), and the buffers (`shared_memory`). The service fills buffers ahead and announces them in the page; after that
the socket carries only wake-up bytes. Over TCP batches follow as frames (`frames`), received into the memory that they are used
in. The service keeps nothing of a client, which may continue at another service of the same stores.
"""
