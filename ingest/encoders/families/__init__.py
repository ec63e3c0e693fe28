"""Text encoders by model family, run the way that each family's diffusers pipeline runs them."""
