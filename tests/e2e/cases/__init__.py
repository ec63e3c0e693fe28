"""Inputs of public bug reports about other tools, as scripts whose last line is OK or FAIL."""
