"""Pages for people, and the documents that describe the server."""
