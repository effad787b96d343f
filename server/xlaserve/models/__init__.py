"""Turns a directory into something callable; the only layer that imports jax."""
