"""Commands that load models compile in their own process, in every test of the command line."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def compiled_here() -> Iterator[None]:
    """Spare each command the start of a process that compiles, 1.4 seconds of a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLASERVE_COMPILE_PROCESSES", "0")
        yield
