"""A directory and an unprivileged user, for tests that run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[Path]:
    """Become nobody, if root, for the duration of a block; yields a directory of that user."""
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
