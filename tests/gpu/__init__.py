"""Checks that need a GPU: `make gpu`. No test module is here, so that pytest collects nothing."""
