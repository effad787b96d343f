"""`xlaserve top`: shows a running server on a terminal."""
