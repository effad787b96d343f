"""Commands that compile models before a server starts."""
