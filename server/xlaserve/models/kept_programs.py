"""Programs of one load in the compilation cache: which are there, and which cannot be used."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import structlog
from jax.experimental import serialize_executable

from xlaserve.models import cache_key
from xlaserve.models.compilation import AUTOTUNE_OPTION, Compilation, flags
from xlaserve.models.compilation_cache import Entry
from xlaserve.models.sites import Site

_log = structlog.get_logger("compilation_cache")


@dataclass(frozen=True, slots=True)
class Place:
    """The key of a program in the cache, and what has to be the same."""

    target: str
    name: str
    program: Mapping[str, str]
    environment: Mapping[str, str]


class KeptPrograms:
    """The compilation cache, as the programs of one model use it; nothing where there is none."""

    def __init__(self, compilation: Compilation, model: str, version: str) -> None:
        self._compilation = compilation
        self._of = {"model": model, "version": version}
        self._dropped: list[str] = []
        """Why entries were not used, since that was logged last."""
        self._told: set[str] = set()
        """Reasons that were logged. Batch sizes that are compiled later have the same."""

    def described(
        self,
        site: Site,
        computation: str,
        packing: str,
        arguments: Sequence[Any],
        outputs: "jax.sharding.Sharding | None",
    ) -> Place:
        """Return the key of a program, as `cache_key.program` takes what it is compiled of."""
        program = cache_key.program(site, computation, packing, arguments, outputs)
        # Where XLA keeps what it tuned changes no program.
        options = self._compilation.options.for_site(site.platform, len(site.devices))
        options.pop(AUTOTUNE_OPTION, None)
        ahead = self._compilation.is_ahead
        given = self._compilation.server_flags if ahead else flags()
        return Place(
            cache_key.target_of(site.platform, str(site.devices[0].device_kind)),
            cache_key.name_of(program),
            program,
            cache_key.environment(site, options, given, is_ahead=ahead),
        )

    def has(self, place: Place) -> bool:
        """Tell whether the cache has a program, which may be of devices that are not there."""
        assert self._compilation.cache is not None
        there = self._compilation.cache.read(place.target, place.name)
        return isinstance(there, Entry) and not _difference(place, there)

    def find(
        self, place: Place, load: Callable[[bytes], jax.stages.Compiled], *, is_run: bool = True
    ) -> jax.stages.Compiled | None:
        """Return a program out of the cache, as `load` makes it of its bytes; None without one.

        `is_run`: whether it is executed before requests come.
        """
        if self._compilation.cache is None:
            return None
        entry = self._compilation.cache.read(place.target, place.name)
        if entry is None:
            return None
        if not isinstance(entry, Entry):
            self.drop(entry.reason)
        elif difference := _difference(place, entry):
            self.drop(difference)
        elif entry.is_ahead and not is_run:
            self.drop("it never ran, and cannot be tried: a loop of it follows its inputs")
        else:
            try:
                return load(entry.executable)
            # Whatever bytes of another make meet in JAX and XLA has no class of its own.
            except Exception as error:
                self.drop(f"it cannot be loaded: {first_line(error)}")
        return None

    def drop(self, reason: str) -> None:
        """Note why a program out of the cache is not used."""
        self._dropped.append(reason)

    def keep(
        self, place: Place | None, executable: jax.stages.Compiled, written: bytes = b""
    ) -> None:
        """Keep a program in the cache, as it was written elsewhere if it was; best effort."""
        if place is None or self._compilation.cache is None:
            return
        try:
            data = written or serialize_executable.serialize(executable)[0]
        # Not every program can be written, and each kind fails with an error of its own.
        except Exception as error:
            _log.info("a program is not kept", **self._of, reason=first_line(error))
            return
        entry = Entry(place.program, place.environment, data, self._compilation.is_ahead)
        self._compilation.cache.write(place.target, place.name, entry)

    def log_dropped(self) -> None:
        """Log why entries of the cache were not used, each reason once for the load."""
        for reason, programs in Counter(self._dropped).items():
            if reason not in self._told:
                _log.warning(
                    "cached programs are not used, they are compiled anew",
                    **self._of,
                    programs=programs,
                    reason=reason,
                )
            self._told.add(reason)
        self._dropped.clear()


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its class where it has none; 300 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _difference(place: Place, entry: Entry) -> str:
    expected, found = {**place.program, **place.environment}, {**entry.program, **entry.environment}
    return cache_key.first_difference(expected, found)
