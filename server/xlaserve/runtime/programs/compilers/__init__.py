"""Compiler processes: they compile programs for loads, and the server deserializes these."""
