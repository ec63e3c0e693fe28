"""Ingest: images and captions through the encoders into a store."""
