"""Benchmarks of training, one file per case."""
