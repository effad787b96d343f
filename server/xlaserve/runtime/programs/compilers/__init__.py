"""Compiler processes, which compile programs for loads; the server deserializes the results."""
