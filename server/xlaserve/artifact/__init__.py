"""The files of a model version: manifest, computation, weights and signature."""
