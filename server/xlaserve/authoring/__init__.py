"""Writes version directories: exports from JAX, adopts `jax.export` files, migrates versions."""
