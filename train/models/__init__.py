"""Load a model of any family, check its encoders, add adapters."""
