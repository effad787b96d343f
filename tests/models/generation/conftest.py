"""Share the compiled programs of generators between all processes of a test run."""

from pathlib import Path

import pytest
from support.generators import kept


@pytest.fixture(scope="session", autouse=True)
def _programs(programs: str) -> None:
    kept.prepare(Path(programs))
