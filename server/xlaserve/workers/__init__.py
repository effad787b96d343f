"""Several processes as one server: a parent with the ports, and serving workers."""
