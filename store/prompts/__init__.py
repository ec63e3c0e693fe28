"""Prompts that stay with a store: the images that a trainer draws along a run, encoded by the store's own text encoders."""
