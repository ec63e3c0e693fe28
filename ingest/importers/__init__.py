"""Import the latent caches of other trainers: one file per format, and the rules that all of them share."""
