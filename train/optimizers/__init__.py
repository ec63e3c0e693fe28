"""Optimizers that are more than a call of their library: 8-bit AdamW, Muon, and AdamW of weights in bf16."""
