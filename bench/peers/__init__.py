"""Other loaders and the limits on the same samples: code that runs in each peer's environment, and code that starts it."""
