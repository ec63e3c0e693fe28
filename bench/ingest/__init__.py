"""Benchmarks of packing, one file per case."""
