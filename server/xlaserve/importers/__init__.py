"""Models of other frameworks, made into exports of JAX."""
