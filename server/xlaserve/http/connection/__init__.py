"""One connection of HTTP/1.1, from its bytes to its answers."""
