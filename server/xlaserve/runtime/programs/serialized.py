"""Serializes compiled programs, and is the only place that deserializes them."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import serialize_executable

from xlaserve.artifact import custom_calls


def written(executable: jax.stages.Compiled) -> bytes:
    """Serialize a program; raises JAX's errors for programs that cannot be serialized."""
    data: bytes = serialize_executable.serialize(executable)[0]
    return data


def loaded(data: bytes, takes: Any, returns: Any, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Deserialize a program from `written` for these devices.

    `takes` and `returns` are the trees of its arguments and results. Registers custom calls first,
    since this process may not have lowered anything yet. Deserializing executes code: the caller
    must trust the bytes. Raises UnknownCustomCall for a custom call that this process lacks, and
    JAX's errors for a program that it cannot load.
    """
    client = devices[0].client
    custom_calls.make_ready(data, devices[0].platform)
    program: jax.stages.Compiled = serialize_executable.deserialize_and_load(
        data, takes, returns, client, devices
    )
    return program
