"""Fewer bits and less memory: products in 8-bit floats, a frozen base in 8 or 4 bits, blocks that wait in host memory."""
