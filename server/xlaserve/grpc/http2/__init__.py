"""A server's side of HTTP/2 (RFC 9113), lean: no objects for frames, no I/O in the core."""
