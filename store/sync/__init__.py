"""Stores between a disk and object storage: push, pull, and changes to a store in a bucket."""
