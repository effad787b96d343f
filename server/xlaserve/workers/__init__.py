"""Several processes as one server: a parent that owns the ports, and workers that serve."""
