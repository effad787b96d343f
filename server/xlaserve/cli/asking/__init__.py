"""Commands that query or control a running server."""
