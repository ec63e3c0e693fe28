"""The driver of a run: its steps before and after the slices are packed."""
