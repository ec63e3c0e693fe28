"""Read one sealed shard: its sidecars, row locations and bytes."""
