"""gRPC-Web: the gRPC services for browsers, over HTTP/1.1."""
