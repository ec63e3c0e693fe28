"""Images that a run draws: of a store's prompts or of stored captions, by the family's pipeline of diffusers."""
