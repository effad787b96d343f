"""The process itself: its log, signals, files, memory, and what starts and replaces it."""

HANDED = "HANDED_LISTENERS"
"""The environment variable with the descriptors that a replacement is given."""
