"""The HTTP/2 engines of the gRPC server: our own, and grpclib's over h2."""
