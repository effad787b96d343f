"""Imports decoder language models from Hugging Face transformers checkpoints."""
