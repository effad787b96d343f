"""Marks of files that change with the file, even if its timestamps are reset."""

import os
from typing import TypeAlias

FileMark: TypeAlias = tuple[int, int, int, int]
"""Inode, size, modification time (mtime) and change time (ctime)."""


def mark_of(status: os.stat_result) -> FileMark:
    """Return the mark of a file with this status.

    A writer can keep a file's size and reset its mtime, as `cp -p`, rsync and tar do. Only the
    kernel sets ctime; it also changes with permissions, owner and number of links.
    """
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
