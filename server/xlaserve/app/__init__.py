"""The composition root: assembles, starts and drains the server."""
