"""Model families: a file each, with what packing and training need to know of it. No other code depends on the family."""
