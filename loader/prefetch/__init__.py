"""Prefetching: readahead, threads, the reorder buffer, and the copy to the device."""
