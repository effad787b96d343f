"""Encoders out of directories of transformers and sentence-transformers, for embeddings."""
