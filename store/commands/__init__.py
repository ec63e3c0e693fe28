"""The commands of `store`, one a module."""
