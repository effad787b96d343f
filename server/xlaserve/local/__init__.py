"""Serving from Python: `xlaserve.serve` runs a server within a block."""
