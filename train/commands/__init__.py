"""The trainer's commands besides training, one per file; `bucketline.cli` lists them."""
