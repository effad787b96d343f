"""Engines beneath the gRPC server, and their common parts."""
