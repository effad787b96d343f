"""Exports of JAX as models that can be called."""
