"""Turn the bytes of a file into the pixels of its bucket, or into a reason for rejecting it."""
