"""Engines beneath the gRPC server, and what they have in common."""
