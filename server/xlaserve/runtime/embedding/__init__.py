"""Embedding models: declared tokens, and batches of them."""
