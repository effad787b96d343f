"""Rewrites operations into equivalent ones that are faster on the CPU."""
