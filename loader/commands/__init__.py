"""One file a command; `loader.cli` lists them."""
