"""Imports embedding models from transformers and sentence-transformers checkpoints."""
