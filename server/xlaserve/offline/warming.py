"""Fills the compilation cache with the programs of one version."""

import time
from dataclasses import dataclass
from pathlib import Path

from xlaserve.errors import XlaserveError
from xlaserve.offline.targets.jobs import Compiled
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext


@dataclass(frozen=True, slots=True)
class Warmed:
    """The result of warming one version."""

    model: str
    version: str
    compiled: int = 0
    """Number of programs compiled and added to the cache."""
    cached: int = 0
    """Number of programs found in the cache."""
    seconds: float = 0.0
    problem: str = ""
    """Why the version cannot be loaded; empty if it can."""
    notice: str = ""
    """Why servers will compile the version nevertheless; empty if they will not."""


def warm_here(path: Path, context: LoadContext) -> Warmed:
    """Load a version on this machine's device, as a server does, and unload it. Blocks.

    Afterwards, every program of the load is in the cache and has been executed.
    """
    started = time.perf_counter()
    try:
        model = loaders.load(path, context)
    except XlaserveError as error:
        return Warmed(context.model, context.version, problem=str(error))
    info = model.info
    model.close()
    seconds = time.perf_counter() - started
    return Warmed(
        context.model, context.version, info.compiled_programs, info.cached_programs, seconds
    )


def warmed_ahead(model: str, version: str, found: Compiled) -> Warmed:
    """Return the outcome for a version compiled for absent devices."""
    seconds = [program.compile_seconds for program in found.programs]
    compiled = sum(one > 0 for one in seconds)
    return Warmed(
        model,
        version,
        compiled,
        len(seconds) - compiled,
        sum(seconds),
        str(found.problem or ""),
        found.notice,
    )
