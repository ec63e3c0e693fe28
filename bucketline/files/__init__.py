"""Files on disk: atomic writes and folders, locks, free space, overlapping paths. Independent of the store."""
