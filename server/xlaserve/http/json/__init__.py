"""Reading, checking and writing JSON with tensors."""
