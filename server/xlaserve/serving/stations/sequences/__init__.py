"""Stations for sequences of requests that belong together."""
