"""Other loaders and the limits, on the same samples: what runs in each one's own environment, and what asks it to."""
