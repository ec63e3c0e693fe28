"""Report pages: self-contained HTML with inlined style, script and images, which opens from a disk without a network."""
