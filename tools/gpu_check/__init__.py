"""Checks that need a device: answers, memory, overlapping copies, and behavior under load."""
