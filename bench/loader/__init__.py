"""Benchmarks of the loader, one file per case."""
