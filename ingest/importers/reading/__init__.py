"""Read what is common to caches: files without running them, captions, sample ids, layouts of text embeddings."""
