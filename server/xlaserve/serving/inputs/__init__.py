"""Inputs that are no plain tensors: images, shared memory, classifications."""
