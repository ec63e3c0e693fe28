"""The service over a network: batches for machines without the store and its credentials, and metrics.

A server (`listener`) and a client (`remote_loader`) speak the protocol of `wire`. The server keeps nothing of a client, whose
state is a step number, so a client may continue at any server of the same stores.
"""
