"""Callable models: detection, loading, compilation, execution."""
