"""The outputs of a run: its folder, checkpoints, weights, metrics and progress."""
