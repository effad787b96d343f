"""Fills the compilation cache with the programs of one version, so that a server compiles none."""

import time
from dataclasses import dataclass
from pathlib import Path

from xlaserve.errors import XlaserveError
from xlaserve.models import loaders
from xlaserve.models.loaded import LoadContext


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one version."""

    model: str
    version: str
    compiled: int = 0
    """Programs that were compiled, and are kept from now on."""
    cached: int = 0
    """Programs that were there."""
    seconds: float = 0.0
    problem: str = ""
    """Why it cannot be loaded; empty where it can."""


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
