"""The server side of HTTP/2 (RFC 9113): no objects for frames, no I/O in the core."""
