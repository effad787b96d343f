"""Measures a V2 server from outside: latency and throughput at one load after the other."""
