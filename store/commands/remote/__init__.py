"""Commands that only stores in object storage need: `push`, `pull`, and `cache` for what is kept of them on this machine."""
