"""Threads for computing and blocking work, to keep the event loop responsive."""
