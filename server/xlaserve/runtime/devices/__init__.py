"""Devices, and where the parts of a model lie on them."""
