"""A second tier of the cache in host memory. The folder may be deleted; nothing else needs it."""
