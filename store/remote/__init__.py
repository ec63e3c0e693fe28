"""Stores in object storage: their objects, generations and commits."""
