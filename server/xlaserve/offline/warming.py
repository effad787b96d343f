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
    """Programs that were compiled, and are kept from now on."""
    cached: int = 0
    """Programs found in the cache."""
    seconds: float = 0.0
    problem: str = ""
    """Why it cannot be loaded; empty where it can."""
    notice: str = ""
    """Why servers will compile it nevertheless; empty where they will not."""


def warm_here(path: Path, context: LoadContext) -> Warmed:
    """Load a version on the device of this machine, as a server does, and let it go. Blocks.

    Every program of its load is in the cache afterwards, and has run.
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
