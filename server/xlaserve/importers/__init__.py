"""Importers that convert models from other frameworks to JAX exports."""
