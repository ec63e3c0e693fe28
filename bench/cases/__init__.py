"""The cases: a file each, named by what it measures."""
