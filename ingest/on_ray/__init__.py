"""`ingest pack --engine ray`: workers of a Ray cluster pack slices of the source; the driver commits them."""
