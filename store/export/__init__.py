"""Export samples from a store, atomically."""
