"""Decides: numpy in, numpy out; knows no wire and no JAX."""
