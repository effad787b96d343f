"""Finds and stores one load's programs in the compilation cache and the store."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import structlog

from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.programs import cache_key, serialized
from xlaserve.runtime.programs.compilation import Compilation, XlaOptions, flags
from xlaserve.runtime.programs.compilation_cache import CompilationCache, Entry, Unusable, name_of
from xlaserve.runtime.programs.program_counts import ProgramCounts

_log = structlog.get_logger("compilation_cache")


@dataclass(frozen=True, slots=True)
class ProgramKey:
    """The key of a program in the cache, and its environment."""

    target: str
    name: str
    """Name of the program, without its environment."""
    program: Mapping[str, str]
    environment: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the file names that the program may have in a directory, the preferred one first.

        Names include the environment, so that programs compiled by different versions of JAX or
        for different devices can share the directory.
        """
        environments = [self.environment]
        if self.environment.get("platform") == "cuda":
            # The name of a program that was compiled ahead of time, without the device.
            environments.append({**self.environment, "platform_version": cache_key.UNKNOWN})
        names = [f"{self.name}-{name_of(one)}" for one in environments]
        # The last name is that of older releases.
        return tuple(dict.fromkeys((*names, self.name)))

    @property
    def names_in_store(self) -> tuple[str, ...]:
        """Return the names that the program may have in a store, the preferred one first."""
        whole = {**self.program, **self.environment}
        names = [name_of(whole)]
        if self.environment.get("platform") == "cuda":
            # The name of a program that was compiled ahead of time, without the device.
            names.append(name_of({**whole, "platform_version": cache_key.UNKNOWN}))
        return tuple(dict.fromkeys(names))


class KeptPrograms:
    """One load's access to the compilation cache and the store; finds nothing without them."""

    def __init__(self, compilation: Compilation, model: str, version: str) -> None:
        self._compilation = compilation
        self._of = {"model": model, "version": version}
        self._dropped: list[str] = []
        """Why entries were not used, since the last log entry."""
        self._spoiled: set[str] = set()
        """Names of programs in the store that cannot be used, and will be replaced."""
        self._logged: set[str] = set()
        """Reasons already logged: later batch sizes would repeat them."""

    @property
    def options(self) -> XlaOptions:
        """Return the XLA options, which are part of each key."""
        return self._compilation.options

    def described(
        self,
        site: Site,
        computation: str,
        packing: str,
        arguments: Sequence[Any],
        outputs: "jax.sharding.Sharding | None",
    ) -> ProgramKey:
        """Return a program's key, from the arguments of `cache_key.program`."""
        program = cache_key.program(site, computation, packing, arguments, outputs)
        options = self._compilation.options.key(site.platform, len(site.devices))
        ahead = self._compilation.is_ahead
        given = self._compilation.server_flags if ahead else flags()
        return ProgramKey(
            cache_key.target_of(site.platform, str(site.devices[0].device_kind)),
            name_of(program),
            program,
            cache_key.environment(site, options, given, is_ahead=ahead),
        )

    def has(self, place: ProgramKey) -> bool:
        """Tell whether the cache has a program; the host may lack its devices."""
        assert self._compilation.cache is not None
        there = self._compilation.cache.read(place.target, *place.names)
        return isinstance(there, Entry) and not _difference(place, there)

    def find(
        self,
        place: ProgramKey,
        load: Callable[[bytes], jax.stages.Compiled],
        *,
        is_run: bool = True,
    ) -> jax.stages.Compiled | None:
        """Return a cached program, deserialized by `load`, or None on a miss.

        A program that is missing in the directory is looked up in the store, and copied to the
        directory. `is_run`: the program is executed before requests arrive.
        """
        cache, store = self._compilation.cache, self._compilation.store
        if cache is not None:
            read = cache.read(place.target, *place.names)
            found = self._usable(place, read, load, is_run=is_run)
            _recount(cache.counts, read, found)
            if read is None and store is None:
                self._drop_others(cache, place)
            if found is not None or store is None:
                return found
        if store is None:
            return None
        read = store.find(place.target, place.names_in_store)
        found = self._usable(place, read, load, is_run=is_run, where=f"{store.url}: ")
        _recount(store.counts, read, found)
        if found is None:
            if read is not None:
                self._spoiled.add(place.name)
        elif cache is not None and isinstance(read, Entry):
            cache.write(place.target, place.names[0], read)
        return found

    def _drop_others(self, cache: CompilationCache, place: ProgramKey) -> None:
        """Record how the environment differs if the cache only has the program for another one."""
        other = cache.latest(place.target, f"{place.name}-")
        if other is not None:
            difference = cache_key.first_difference(place.environment, other.environment)
            self.drop(difference or "it was compiled in a different environment")

    def _usable(
        self,
        place: ProgramKey,
        entry: Entry | Unusable | None,
        load: Callable[[bytes], jax.stages.Compiled],
        *,
        is_run: bool,
        where: str = "",
    ) -> jax.stages.Compiled | None:
        """Load an entry's program; if it is unusable, note why and return None."""
        if entry is None:
            return None
        if not isinstance(entry, Entry):
            self.drop(f"{where}{entry.reason}")
        elif difference := _difference(place, entry):
            self.drop(f"{where}{difference}")
        elif entry.is_ahead and not is_run:
            self.drop(
                f"{where}it was never executed and cannot be tested, since a loop depends"
                " on its inputs"
            )
        else:
            try:
                return load(entry.executable)
            # JAX and XLA raise errors of many classes for programs of another version.
            except Exception as error:
                self.drop(f"{where}it cannot be loaded: {first_line(error)}")
        return None

    def drop(self, reason: str) -> None:
        """Note why a program from the cache is not used."""
        self._dropped.append(reason)

    def keep(
        self,
        place: ProgramKey | None,
        executable: jax.stages.Compiled,
        written: bytes = b"",
        *,
        is_again: bool = False,
    ) -> None:
        """Store a program in the cache, serialized if it is not yet; best effort.

        `is_again`: replace an unusable entry.
        """
        if place is None or not self._compilation.is_kept:
            return
        try:
            data = written or serialized.written(executable)
        # Some programs cannot be serialized, and the class of the error depends on the program.
        except Exception as error:
            _log.info("compiled program not kept", **self._of, reason=first_line(error))
            return
        entry = Entry(place.program, place.environment, data, self._compilation.is_ahead)
        if self._compilation.cache is not None:
            self._compilation.cache.write(place.target, place.names[0], entry)
        if self._compilation.store is not None:
            is_again = is_again or place.name in self._spoiled
            name = place.names_in_store[0]
            self._compilation.store.put(place.target, name, entry, is_again=is_again)

    def log_dropped(self) -> None:
        """Log why cache entries were not used, each reason once per load."""
        for reason, programs in Counter(self._dropped).items():
            if reason not in self._logged:
                _log.warning(
                    "cached programs not used, compiling again",
                    **self._of,
                    programs=programs,
                    reason=reason,
                )
            self._logged.add(reason)
        self._dropped.clear()


def first_line(error: Exception) -> str:
    """Return the first line of an error (at most 300 characters), or its class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


def _difference(place: ProgramKey, entry: Entry) -> str:
    expected, found = {**place.program, **place.environment}, {**entry.program, **entry.environment}
    return cache_key.first_difference(expected, found)


def _recount(
    counts: ProgramCounts, read: Entry | Unusable | None, found: jax.stages.Compiled | None
) -> None:
    """Count a hit as unusable if its program could not be used."""
    if found is None and isinstance(read, Entry):
        counts.add(hits=-1, unusable=1)
