"""The memory that training needs, counted without a device: `bucketline train memory`."""
