"""A store's files in a cache on this machine: sparse files, filled line by line, shared by all processes."""
