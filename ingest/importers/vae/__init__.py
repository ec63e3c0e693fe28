"""The VAE of imported latents: its constants, undoing a cache's scaling by them, and checks of the result."""
