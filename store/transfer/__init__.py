"""Files between a disk and object storage: sent, got, and sent while others are made."""
