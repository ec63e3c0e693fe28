"""Which rows a step reads: pure functions of (seed, step)."""
