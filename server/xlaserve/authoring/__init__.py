"""Authoring of version directories: export from JAX, adopt, migrate."""
