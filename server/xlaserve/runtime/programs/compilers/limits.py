"""File limits that a compiler process sets for itself. Does not import JAX."""

FILE_BYTES = 64 << 20
"""Maximum file size, for XLA's output and dumps; the process writes no other files."""

OPEN_FILES = 256
