"""WebDataset tars as a source, local or streamed; nothing is extracted."""
