"""Benchmarks: each a case of its own, with the physical limit measured beside it in the same run."""
