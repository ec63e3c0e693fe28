"""The service: one process reads for all others on a machine, through shared memory, and for other machines, over TCP.

A client connects (`sockets`), proves that it may, and sends one message, which is answered by one (`wire`). The service sends
the manifests of its stores, so the client makes the plan; what it then requests are batches of that plan from a position on.
Over a unix socket the answer has a descriptor of shared memory, in which the service fills buffers ahead (`ring`); after that
the socket carries only wake-up bytes. Over TCP batches follow as frames (`tcp`), received into the memory that they are used
in. The service keeps nothing of a client, which may continue at another service of the same stores.
"""
