"""Connections, whatever is spoken on them: memory, TLS, accepting, compression, statuses."""
