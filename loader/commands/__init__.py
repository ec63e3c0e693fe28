"""One file per command; `loader.cli` lists them."""
