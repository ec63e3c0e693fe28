"""The trainer: one lean loop over a store's batches; `torchrun train/main.py --help` starts here."""
