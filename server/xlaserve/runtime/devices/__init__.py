"""Devices, and the placement of models on them."""
