"""Measures a server that generates tokens, with requests that arrive whether it keeps up or not."""
