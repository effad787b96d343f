"""Commands that compile ahead of a server."""
