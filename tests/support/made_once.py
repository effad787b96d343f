"""Directories created once and shared by all processes of a test run."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory filled by `make`, in this process or in another one of the run.

    Treat it as read-only. If `make` raises, the next caller tries again.
    """
    base = factory.getbasetemp()
    # xdist workers have sibling base directories.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = shared / f"made-{name}"
    with (shared / f"{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            making = factory.mktemp(name)
            make(making)
            making.rename(made)
    return made
