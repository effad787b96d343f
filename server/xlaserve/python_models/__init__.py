"""Models implemented in Python, in a model.py of the version directory."""
