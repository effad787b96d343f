"""Prepares the functions of jaxlib that programs call by name (custom calls).

XLA rejects a program that calls an unregistered name, but does not notice a registered function
that is not initialized. LAPACK functions are null pointers until `initialize` has looked them up in
SciPy, and calling one crashes the process. JAX initializes them while lowering, which a process
that only deserializes programs never does.
"""

# Some of the jaxlib functions called here are untyped.
# mypy: disallow-untyped-calls=False

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from jax.ffi import register_ffi_target
from jaxlib import xla_client

CPU, CUDA = "cpu", "cuda"


class UnknownCustomCall(Exception):
    """A program calls a function that this process does not have; the text names it."""

    def __init__(self, target: str, platform: str) -> None:
        super().__init__(
            f"it calls '{target[:64]}', which the installed jaxlib does not have on {platform}"
        )


@dataclass(frozen=True, slots=True)
class Library:
    """A module of jaxlib with functions for custom calls."""

    module: str
    platform: str
    """Platform that the functions run on."""
    mark: bytes = b""
    """Part of the name of each function that needs initialization."""
    initialize: str = ""
    """Attribute path of the initializing function, or an empty string if none is needed."""
    parts: tuple[str, ...] = ()
    """Extension modules that list the functions, if jaxlib registers them at import."""


LIBRARIES = (
    Library("lapack", CPU, b"lapack_", "_lapack.initialize"),
    Library("cpu_sparse", CPU),
    Library("gpu_linalg", CUDA),
    Library("gpu_solver", CUDA, b"hybrid_", "initialize_hybrid_kernels"),
    Library("gpu_sparse", CUDA),
    Library("gpu_prng", CUDA),
    Library("gpu_rnn", CUDA, parts=("_cuda_rnn", "_hip_rnn")),
    Library("gpu_triton", CUDA, parts=("_cuda_triton", "_hip_triton")),
)
"""All modules of jaxlib that register functions."""

_HOST = "Host"
"""XLA's name for the CPU."""
_PLATFORMS = {"gpu": CUDA}
"""Registration platforms by XLA's platform name, where they differ."""
_FOREIGN = re.compile(r"lapack_\w+|\w+_ffi|(cu|hip)(hybrid)?_\w+")
"""Names of jaxlib's functions; all others belong to XLA."""

_CUSTOM_CALL = b"\x12\x0bcustom-call"
"""Serialized opcode (field 2) of a custom call in an HloInstructionProto."""
_PARAMETER = b"\x12\x09parameter"
"""Serialized opcode of a parameter. A program that lacks it is encoded in an unknown way."""
_TARGET = 28
"""Number of the field with the call target; fields are sorted by number."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@cache
def register() -> None:
    """Register the functions of every library; JAX registers some only when they are first used."""
    for library in LIBRARIES:
        module = _module(library)
        for platform, functions in _registrations(module).items():
            for name, function, version in functions:
                register_ffi_target(name, function, platform=platform, api_version=version)


def make_ready(program: bytes, platform: str) -> None:
    """Prepare the custom calls of a serialized program; raises UnknownCustomCall.

    LAPACK is initialized with the first program that calls it. That takes some 0.3 seconds of CPU
    time, too long for every start of a server.
    """
    register()
    is_readable = _PARAMETER in program
    for library in LIBRARIES:
        if library.initialize and (library.mark in program or not is_readable):
            _initialize(library)
    known = _known(platform)
    for target in targets_of(program):
        if known and target not in known and _FOREIGN.fullmatch(target):
            raise UnknownCustomCall(target, platform)


def targets_of(program: bytes) -> frozenset[str]:
    """Return the targets of the custom calls of a serialized program."""
    return frozenset(_targets(program))


def is_missing(target: str) -> bool:
    """Tell whether a target is a LAPACK function that the installed jaxlib does not have."""
    return target.startswith("lapack_") and target not in _known(CPU)


@cache
def _initialize(library: Library) -> None:
    found: Any = _module(library)
    for name in library.initialize.split("."):
        found = getattr(found, name)
    found()


def _module(library: Library) -> Any:
    return importlib.import_module(f"jaxlib.{library.module}")


def _registrations(module: Any) -> dict[str, list[tuple[str, Any, int]]]:
    return module.registrations() if hasattr(module, "registrations") else {}


def _known(platform: str) -> frozenset[str]:
    """Return the names registered for a platform, or an empty set if they cannot be listed."""
    register()
    if platform == CPU:
        # Other code may register functions at any time, and the backend's libraries register some.
        return _names_of(CPU).union(xla_client.custom_call_targets(_HOST))
    return _names_of(_PLATFORMS.get(platform, platform))


@cache
def _names_of(platform: str) -> frozenset[str]:
    names: set[str] = set()
    for library in LIBRARIES:
        if library.platform == platform:
            module = _module(library)
            rows = _registrations(module).values()
            names.update(name for functions in rows for name, *_ in functions)
            parts = filter(None, (getattr(module, part, None) for part in library.parts))
            names.update(name for part in parts for name in part.registrations())
    return frozenset(names)


# --- parsing of serialized programs ---


def _targets(program: bytes) -> Iterator[str]:
    at = program.find(_CUSTOM_CALL)
    while at >= 0:
        at += len(_CUSTOM_CALL)
        target = _target_behind(program, at)
        if target is not None:
            yield target.decode(errors="replace")
        at = program.find(_CUSTOM_CALL, at)


def _target_behind(program: bytes, at: int) -> bytes | None:
    """Return the custom call's target if an opcode ends at this position; otherwise None."""
    try:
        while True:
            key, at = _varint(program, at)
            field, kind = key >> 3, key & 7
            if field > _TARGET:
                return None
            if kind == _VARINT:
                _, at = _varint(program, at)
            elif kind == _BYTES:
                size, at = _varint(program, at)
                if field == _TARGET:
                    return program[at : at + size]
                at += size
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                return None
    except IndexError:
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at a position; return its value and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
