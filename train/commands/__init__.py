"""The trainer's commands besides training, one a file; `bucketline.cli` lists them."""
