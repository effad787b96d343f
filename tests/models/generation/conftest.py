"""Generators are compiled once for all processes of a run of the tests."""

from pathlib import Path

import pytest
from support.generators import kept


@pytest.fixture(scope="session", autouse=True)
def _programs(programs: str) -> None:
    kept.prepare(Path(programs))
