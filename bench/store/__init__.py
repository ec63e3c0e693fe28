"""Benchmarks of the store, one file per case."""
