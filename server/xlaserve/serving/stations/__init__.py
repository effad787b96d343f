"""Stations: each executes the calls of one loaded instance."""
