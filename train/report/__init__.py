"""`train report`: one page about one run, or about several next to each other. Imports no torch."""
