"""Contracts: tests of what users see, whatever mechanism is behind it. None imports or replaces a private name."""
