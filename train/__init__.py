"""The trainer: one lean training loop over a store's batches. Start with `torchrun train/main.py --help`."""
