"""HTML pages, and the documents that describe the server."""
