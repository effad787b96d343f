"""Marks of files, which differ once a file has changed, whatever its timestamps say."""

import os
from typing import TypeAlias

FileMark: TypeAlias = tuple[int, int, int, int]
"""Inode, size, time of modification, time of change."""


def mark_of(status: os.stat_result) -> FileMark:
    """Return the mark of a file with this status.

    Who writes to a file can have its old size, and can set its time of modification back, as `cp
    -p`, rsync and tar do. The time of its change (ctime) is the system's: it also moves with the
    permissions of a file, its owner, and the number of its links.
    """
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
