"""`store report`: what is in a store and what is wrong with it, as one HTML page; previews of latents without a VAE."""
