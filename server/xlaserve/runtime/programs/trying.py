"""Executes a trial of an artifact, in a process that may be killed."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.row_proofs import neighbours
from xlaserve.row_proofs.neighbours import Difference, Say
from xlaserve.runtime.programs.compilers.jobs import Array, Named, Trial
from xlaserve.runtime.programs.compilers.process import DOING
from xlaserve.tensors import Tensor, TensorSpec, datatype_named

FIRST = "its first execution, on "
"""Prefix of errors in the first execution, which shows whether the model terminates."""

_SEED = 0


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a completed trial."""

    difference: Difference | None = None


def tried(
    model: Callable[..., Any],
    leaves: Sequence[Tensor],
    trial: Trial,
    limit_processor: Callable[[float], None],
    say: Say,
) -> Tried:
    """Execute a model as a trial requires; raises the errors of JAX and XLA.

    Calls `say` before each phase, because the phase may crash the process.
    """
    inputs = tuple(map(_spec, trial.inputs))
    outputs = tuple(map(_spec, trial.outputs))
    call = jax.jit(model)

    def run(tensors: Sequence[Tensor]) -> list[Tensor]:
        with jax.enable_x64(trial.is_wide):
            return [np.asarray(output) for output in call(list(leaves), list(tensors))]

    if trial.first:
        say("the compilation of a first execution")
        given = first_inputs(trial, inputs)
        with jax.enable_x64(trial.is_wide):
            executable = call.lower(list(leaves), given).compile()
        say(f"{FIRST}{'zeros' if trial.is_of_zeros else 'random numbers'}")
        limit_processor(trial.first_seconds)
        jax.block_until_ready(executable(list(leaves), given))
    limit_processor(trial.processor_seconds)
    if trial.is_thorough:
        return Tried(neighbours.find_difference(run, inputs, outputs, say=say))
    if trial.outputs:
        return Tried(neighbours.find_contradiction(run, inputs, outputs, say=say))
    return Tried()


def first_inputs(trial: Trial, inputs: Sequence[TensorSpec]) -> list[Tensor]:
    """Return the inputs of the first execution."""
    if trial.is_of_zeros:
        return [
            np.zeros(shape, spec.datatype.dtype)
            for spec, shape in zip(inputs, trial.first, strict=True)
        ]
    random = np.random.default_rng(_SEED)
    return [
        neighbours.random_numbers(random, spec, shape)
        for spec, shape in zip(inputs, trial.first, strict=True)
    ]


def leaves_of(described: Sequence[Array], data: bytes) -> list[Tensor]:
    """Return the parameters in these bytes, or random ones if there are no bytes."""
    if not data:
        random = np.random.default_rng(_SEED)
        return [_random_leaf(random, one) for one in described]
    found, start = [], 0
    for one in described:
        dtype = jnp.dtype(one.dtype)
        size = prod(one.shape) * dtype.itemsize
        part = np.frombuffer(data, np.uint8, size, start)
        found.append(part.view(dtype).reshape(one.shape))
        start += size
    return found


def _random_leaf(random: np.random.Generator, described: Array) -> Tensor:
    dtype = jnp.dtype(described.dtype)
    if dtype.kind in "iub":
        return np.asarray(random.integers(0, 2, described.shape)).astype(dtype)
    # Scale the values so that sums of products keep their magnitude.
    scale = max(1, prod(described.shape[:-1])) ** -0.5
    numbers: Tensor = np.asarray(random.standard_normal(described.shape) * scale)
    found: Tensor = numbers.astype(dtype)
    return found


def say(phrase: str) -> None:
    """Write the next phase to stderr, where the server finds it if this process dies."""
    print(f"{DOING}{phrase}", file=sys.stderr, flush=True)  # noqa: T201, the server reads it


def _spec(named: Named) -> TensorSpec:
    return TensorSpec(named.name, datatype_named(named.datatype), named.shape)
