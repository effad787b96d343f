"""Models exported by JAX, as callable models."""
