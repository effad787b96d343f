"""Models that are Python code of the operator's."""
