"""The services: V2, ModelRuntime, health, reflection, and those of others."""
