"""ModelInfer over gRPC: codec, fast path, and streams."""
