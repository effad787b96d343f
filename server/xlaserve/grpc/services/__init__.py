"""The gRPC services: V2, ModelRuntime, health, reflection, and custom ones."""
