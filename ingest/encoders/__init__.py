"""The encoders: a VAE for the pictures, a text encoder for the captions, both from a folder in diffusers' layout."""
