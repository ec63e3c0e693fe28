"""Benchmarks: one case each, with the physical limit measured in the same run."""
