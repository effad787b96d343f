"""Requests to a process that compiles for loads, and its answers. Needs no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass, field

READY = b"ready\n"
"""The first line of a process, once it can compile."""


@dataclass(frozen=True, slots=True)
class Array:
    """Dtype and shape of an argument."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Packed:
    """The places of small parameters in their buffers, as `packing.Packing` has it."""

    count: int
    buffers: tuple[tuple[str, int], ...]
    places: Mapping[int, tuple[int, int, int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Job:
    """One program on one CPU device."""

    model: str
    computation: str
    """Key of its computation."""
    device: int
    """Index of the device among those of the process, which has as many as the server."""
    packing: Packed
    leaves: tuple[Array, ...]
    inputs: tuple[Array, ...]
    program: Mapping[str, str]
    """The key of the program, field by field (`cache_key.program`)."""
    environment: Mapping[str, str]
    """Versions, flags and processor of the server: a process with others compiles nothing."""
    artifact_bytes: int = 0
    """Length of the artifact behind the line; 0 where the process had it with the job before."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a job: a program, which follows the line, or why there is none."""

    program: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    executable_bytes: int = 0
    sha256: str = ""
    """The digest of the program: XLA loads and runs whatever bits it is given."""
    error: str = ""
    """The objection of JAX or XLA to the computation."""
    refused: str = ""
    """Why it has to be compiled in the server."""
