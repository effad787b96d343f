"""Embedding models: declaration, tokenizer files, batches by length."""
