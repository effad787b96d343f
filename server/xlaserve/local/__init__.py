"""Serving from Python: `xlaserve.serve` runs a server for the length of a block."""
