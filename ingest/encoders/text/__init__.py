"""Encode the captions of any model: of a known family, of classes, or of any transformers text encoder."""
