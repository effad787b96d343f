"""The rules for rows, by family of operations."""
