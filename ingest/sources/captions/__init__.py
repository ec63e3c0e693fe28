"""Sources of captions: files next to images, metadata tables, JSON."""
