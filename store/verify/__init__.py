"""Read a store once and report every fault."""
