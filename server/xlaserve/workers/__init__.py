"""Several processes that are one server: a parent that holds the ports, and workers that serve."""
