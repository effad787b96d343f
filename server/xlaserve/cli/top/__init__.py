"""`xlaserve top`: a live view of a running server in a terminal."""
