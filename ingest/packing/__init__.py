"""Parts of one pack: the store that is packed into, its size, generations meanwhile, and the end."""
