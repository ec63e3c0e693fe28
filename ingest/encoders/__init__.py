"""Encoders from a model folder in diffusers layout: a VAE for images, and a text encoder for captions."""
