"""Compiled programs as bytes, and back: the one place where any is deserialized."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

from xlaserve.artifact import custom_calls


def written(executable: jax.stages.Compiled) -> bytes:
    """Return the bytes of a program; raises whatever JAX raises for one that it cannot write."""
    data: bytes = serialize_executable.serialize(executable)[0]
    return data


def loaded(data: bytes, takes: Any, returns: Any, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Return a program that `written` wrote, for these devices.

    `takes` and `returns` are the trees of its arguments and results. What it calls is ready before
    it is deserialized: the process may never have lowered anything itself. To read bytes is to
    execute them: whoever calls this trusts them. Raises UnknownCustomCall for a program that calls
    what this process does not have, and whatever JAX raises for one that it cannot load.
    """
    client = devices[0].client
    custom_calls.make_ready(data, devices[0].platform)
    program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        data, takes, returns, client, devices
    )
    return program
