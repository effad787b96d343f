"""Rules for abstract values, by family of operations."""
