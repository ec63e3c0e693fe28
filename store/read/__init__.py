"""The store's read API."""
