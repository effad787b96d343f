"""Models in memory: found, loaded, accounted for, evicted and unloaded."""
