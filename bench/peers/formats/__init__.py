"""One file per compared loader, run in the loader's environment: it imports only numpy, the peer, and `bench.peers` files."""
