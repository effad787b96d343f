"""Compiled programs: cache keys, caches, compilation and sharing."""
