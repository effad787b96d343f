"""`xlaserve bench`: measures a model of a running server."""
