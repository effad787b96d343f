"""Files of models: allowed roots, the only opener, temporary directories."""
