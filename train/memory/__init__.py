"""The memory of training: its amount, and the means to need less."""
