"""Optimizers besides AdamW, found by their names: a small file each, and their properties in `kinds`."""
