"""gRPC-Web: what browsers can carry of gRPC, over HTTP/1.1, to the services of gRPC."""
