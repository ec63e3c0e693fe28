"""One file per command, which `loader.cli` lists, and the options that several have."""
