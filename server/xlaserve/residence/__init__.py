"""Which models are there: found, loaded, accounted for, evicted and unloaded."""
