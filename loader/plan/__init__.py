"""The rows that a step reads: pure functions of (seed, step)."""
