"""Measures latency and throughput of a V2 server at several levels of load."""
