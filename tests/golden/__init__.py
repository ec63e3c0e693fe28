"""Golden results: what a change that only deletes or moves code must leave equal to the last bit."""
