"""Puts the transports together over the core, for the composition root."""
