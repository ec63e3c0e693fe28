"""Packing with several processes: which rank packs what, how ranks talk to rank 0, and how a signal stops them."""
