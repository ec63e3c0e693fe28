"""Ingest: encode images and captions and pack them into a store."""
