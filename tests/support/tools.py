"""External programs that tests run: a missing one skips the test, or fails it in CI."""

import os
import shutil
from collections.abc import Mapping
from typing import NoReturn

import pytest

REQUIRE = "REQUIRE_TOOLS"
_FALSE = ("", "0", "false", "no")


def required(environment: Mapping[str, str]) -> bool:
    """Return whether missing programs fail tests: `REQUIRE_TOOLS` if set, else `CI`."""
    said = environment.get(REQUIRE) or environment.get("CI", "")
    return said.lower() not in _FALSE


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it if all tools are required."""
    if required(os.environ):
        pytest.fail(
            f"{reason}, and in CI every tool is required ({REQUIRE}=0 skips)", pytrace=False
        )
    pytest.skip(reason)


def program(*names: str) -> str:
    """Return the path of the first of these programs that is installed."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        missing(" or ".join(names) + " is not installed")
    return found
