"""Directories that are made once for all processes of a run of the tests."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that `make` has filled, in this process or in another of the run.

    Not to be written to. Where making it fails, the next one that asks makes it again.
    """
    base = factory.getbasetemp()
    # The processes of xdist have one base each, side by side.
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made = shared / f"made-{name}"
    with (shared / f"{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            making = factory.mktemp(name)
            make(making)
            making.rename(made)
    return made
