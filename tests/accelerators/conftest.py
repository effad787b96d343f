"""Compilation for absent devices, on each platform whose wheels are installed."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from xlaserve.errors import DeviceUnavailable
from xlaserve.offline.targets import wheels
from xlaserve.offline.targets.compiling import Compilers
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices.target_kinds import Target, named


@dataclass(frozen=True)
class Platform:
    """A platform, with the device kind that most tests compile for."""

    name: str
    target: Target


def _platform(name: str, target: str) -> Platform:
    found = named(target)
    try:
        wheels.check(found)
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    return Platform(name, found)


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(("cuda", "h100"), marks=pytest.mark.cuda, id="cuda"),
        pytest.param(("tpu", "v5e"), marks=pytest.mark.tpu, id="tpu"),
    ],
)
def platform(request: pytest.FixtureRequest) -> Platform:
    """Return each platform; skip with the reason if its wheels are not installed."""
    return _platform(*request.param)


@pytest.fixture(scope="session")
def compilers(platform: Platform) -> Iterator[Compilers]:
    with Compilers(most=1) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def _jax_started() -> None:
    jax_runtime.start("cpu")
