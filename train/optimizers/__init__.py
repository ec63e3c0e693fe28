"""The optimizers that a run can choose: one small file each, and what a run must know of each in `choice`."""
