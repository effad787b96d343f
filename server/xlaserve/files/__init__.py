"""Model files: permitted directories, safe opening, temporary directories."""
