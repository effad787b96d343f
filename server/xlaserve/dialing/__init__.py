"""Calls to a V2 server as its client: one interface over gRPC and REST."""
