"""Loaded models that were exported by JAX."""
