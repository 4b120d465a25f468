"""A foreign server's cache, from the KV events that it publishes: read, put in order, drawn as ours is."""
