"""Models of embeddings: what an ordinary model declares of its tokens, and batches of them."""
