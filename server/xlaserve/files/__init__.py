"""Files of models: the roots that they lie in, the one opener, temporary directories."""
