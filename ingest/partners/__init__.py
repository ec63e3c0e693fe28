"""Partners of images: references and masks, found by name, opened and transformed with them."""
