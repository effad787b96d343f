"""The lifecycle of models in memory: find, load, account for, evict and unload."""
