"""Tensors as JSON."""
