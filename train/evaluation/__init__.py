"""Evaluation of a run: validation loss and images."""
