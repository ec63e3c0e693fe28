"""The byte layout of a store (FORMAT.md) in code, and every name that two folders share."""
