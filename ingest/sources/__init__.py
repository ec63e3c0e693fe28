"""Sources: where images and captions come from, behind one protocol."""
