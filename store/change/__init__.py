"""Changes to a published store: drop, compact, merge, repair, garbage collection."""
