"""The V2 service over gRPC, its wire codec, health and reflection."""
