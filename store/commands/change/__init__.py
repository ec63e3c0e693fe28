"""Commands that change a store: `drop`, `compact`, `merge`, `repair`, `restore`."""
