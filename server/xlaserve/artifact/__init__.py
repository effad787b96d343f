"""The files of a model version: manifest, StableHLO module, weights and signature."""
