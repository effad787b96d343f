"""The server side of HTTP/2 (RFC 9113), without I/O except in `protocol`."""
