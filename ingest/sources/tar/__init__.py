"""WebDataset tars as a source, in files or in object storage; nothing is extracted."""
