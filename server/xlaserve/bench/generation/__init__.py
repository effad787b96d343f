"""Measures token generation with requests that arrive whether the server keeps up or not."""
