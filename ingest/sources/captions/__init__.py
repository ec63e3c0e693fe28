"""Where captions come from: files next to images, metadata tables, JSON."""
