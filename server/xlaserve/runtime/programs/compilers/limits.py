"""Limits of files that a process which compiles sets for itself. Needs no JAX."""

FILE_BYTES = 64 << 20
"""Limit of XLA's output and dumps; no other file is written."""

OPEN_FILES = 256
