"""ModelInfer on the wire: fast path, general path, streams."""
