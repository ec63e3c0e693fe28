"""Collation: turn planned rows into one batch in one buffer (locate, plan the copies, copy)."""
