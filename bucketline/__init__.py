"""Bucketline: a latent cache, a streaming loader and a lean trainer for latent-diffusion models."""

__version__ = "0.1.0"
