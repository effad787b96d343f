"""How authors make version directories: export from JAX, adopt, migrate."""
