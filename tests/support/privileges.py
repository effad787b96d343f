"""A directory and a user whose permissions count, also where root runs the tests."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[Path]:
    """Be nobody for the length of a block, with a directory of one's own."""
    with TemporaryDirectory() as name:
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(name, _NOBODY, _NOBODY)
            os.seteuid(_NOBODY)
        try:
            yield Path(name)
        finally:
            if is_root:
                os.seteuid(0)
