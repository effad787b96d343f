"""Clients of V2 servers: one interface over gRPC and REST."""
