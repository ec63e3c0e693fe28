"""The formats of other trainers, one per file."""
