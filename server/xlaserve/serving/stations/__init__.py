"""Stations of loaded instances: one for each, of a kind of the table."""
