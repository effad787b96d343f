"""Checks each program that a test writes: the oldest supported JAX must be able to read it."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLING_CONVENTION = 10
"""The newest calling convention of `jax.export` that jax 0.10 reads."""
_READ_BACK = "xlaserve.authoring.read_back"
_Check = Callable[[Path], None]
_allowed: list[None] = []
"""Not empty within `may_be_newer`."""


def watch() -> None:
    """Check the programs of every version from now on; does not import JAX by itself.

    All exporters, importers and migrations call `read_back.check` with what they have written.
    """
    module: Any = sys.modules.get(_READ_BACK)
    if module is not None and not hasattr(module.check, "__wrapped__"):
        module.check = _checking(module.check)


def _checking(check: _Check) -> _Check:
    from xlaserve.artifact.computation import STABLEHLO_VERSIONS

    @functools.wraps(check)
    def checking(directory: Path) -> None:
        check(directory)
        newer = {
            name: (version, convention)
            for name, (version, convention) in _written(directory).items()
            if version not in STABLEHLO_VERSIONS or convention > CALLING_CONVENTION
        }
        assert _allowed or not newer, f"no longer read by the oldest JAX: {newer}"

    return checking


def _written(directory: Path) -> Mapping[str, tuple[str, int]]:
    """Return the StableHLO version and calling convention of each program of a version."""
    from xlaserve.artifact import manifest, wrapper
    from xlaserve.artifact.computation import stablehlo_version

    found = {}
    for path in directory.glob("*.jaxexp"):
        program = wrapper.read(path.read_bytes(), path.name).computation
        found[path.name] = stablehlo_version(program.module), program.calling_convention
    lasting = directory / manifest.STABLEHLO
    if lasting.exists() and (durable := manifest.read(directory).durable) is not None:
        version = stablehlo_version(lasting.read_bytes())
        found[lasting.name] = version, durable.calling_convention
    return found


@contextmanager
def may_be_newer() -> Iterator[None]:
    """Allow programs within this context that only newer JAX versions read."""
    _allowed.append(None)
    try:
        yield
    finally:
        _allowed.pop()
