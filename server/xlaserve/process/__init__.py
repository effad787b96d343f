"""The server process: log, signals, memory, sockets, service manager and replacement."""

HANDED = "HANDED_LISTENERS"
"""Environment variable that lists the descriptors a replacement process inherits."""
