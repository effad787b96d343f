"""Compiled programs as bytes, and back: the one place where any is deserialized."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

from xlaserve.artifact import custom_calls


def written(executable: jax.stages.Compiled) -> bytes:
    """Serialize a program; raises whatever JAX raises for one that it cannot."""
    data: bytes = serialize_executable.serialize(executable)[0]
    return data


def loaded(data: bytes, takes: Any, returns: Any, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Deserialize a program from `written` for these devices.

    `takes` and `returns` are the trees of its arguments and results. Registers its custom calls
    first, since this process may never have lowered anything. Deserializing executes code: the
    caller must trust the bytes. Raises UnknownCustomCall for a program that calls what this process
    does not have, and whatever JAX raises for one that it cannot load.
    """
    client = devices[0].client
    custom_calls.make_ready(data, devices[0].platform)
    program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        data, takes, returns, client, devices
    )
    return program
