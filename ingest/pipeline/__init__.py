"""Packing in one rank: decode images ahead in threads, encode them by bucket, write rows in a separate thread."""
