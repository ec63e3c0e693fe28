"""Programs that a benchmark runs as separate processes."""
