"""Makes the executables of one load, from the compilation cache or by compiling.

An executable from the cache is trusted only after it has run: JAX does not validate it.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import structlog
from jax.errors import JaxRuntimeError
from jax.export import Exported

from xlaserve.runtime.devices.packing import Packing
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.programs import cache_key, serialized
from xlaserve.runtime.programs.compilation import Compilation, CompilerOptions
from xlaserve.runtime.programs.compilers.jobs import Array, Job, Packed
from xlaserve.runtime.programs.compilers.pool import CompilationError, CompilerProcesses, Refused
from xlaserve.runtime.programs.kept_programs import KeptPrograms, ProgramKey, first_line

_log = structlog.get_logger("compilation_cache")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A program to compile: its site and shapes."""

    site: Site
    leaves: Sequence[Any]
    """Parameters, or their shapes."""
    inputs: Sequence[jax.ShapeDtypeStruct]
    outputs: "jax.sharding.Sharding | None"
    """Sharding of the outputs; None to leave them where they are computed."""


@dataclass(frozen=True, slots=True)
class Made:
    """An executable, and whether it was compiled or came from the cache."""

    executable: jax.stages.Compiled
    seconds: float
    is_cached: bool = False


class Source(Protocol):
    """The artifact from which programs are compiled."""

    @property
    def key(self) -> str:
        """Return the computation's key."""
        ...

    @property
    def exported(self) -> Exported:
        """Return the artifact with its module."""
        ...


class Executables:
    """Makes executables of one artifact; their arguments are packed parameters, then inputs."""

    def __init__(
        self,
        source: Source,
        packing: Packing,
        compilation: Compilation | None = None,
        model: str = "",
        version: str = "",
    ) -> None:
        self._source = source
        self.cached = 0
        """Number of executables read from the cache."""
        self.compiled = 0
        self._packing = packing
        self._compilation = compilation or Compilation()
        self._of = {"model": model, "version": version}
        self._kept = KeptPrograms(self._compilation, model, version)
        self._logged: set[str] = set()
        """Messages already logged: later batch sizes would repeat them."""

    def make(
        self,
        wanted: Wanted,
        *,
        is_run: bool = True,
        is_niced: bool = True,
        check_cancelled: Callable[[], None] = lambda: None,
    ) -> Made:
        """Return the executable. `is_run`: it is executed before requests arrive.

        `is_niced`: if a compiler process compiles it, requests take precedence.

        Raises JAX's errors for programs that it cannot compile, or the exception of
        `check_cancelled`.
        """
        started = time.perf_counter()
        place = self._place(wanted)
        if place is not None:
            found = self._kept.find(place, partial(self._loaded, wanted=wanted), is_run=is_run)
            if found is not None:
                self.cached += 1
                return Made(found, time.perf_counter() - started, is_cached=True)
        executable, written = self._compiled_somewhere(wanted, check_cancelled, is_niced=is_niced)
        seconds = time.perf_counter() - started
        self._kept.keep(place, executable, written)
        return Made(executable, seconds)

    def recompile(self, wanted: Wanted, reason: str, *, is_ours: bool = True) -> Made:
        """Compile a program again that came from the cache and proved unusable.

        `is_ours`: this load read it from the cache.
        """
        self.cached -= is_ours
        self._kept.drop(reason)
        started = time.perf_counter()
        executable = self._compiled(wanted)
        seconds = time.perf_counter() - started
        self._kept.keep(self._place(wanted), executable, is_again=True)
        return Made(executable, seconds)

    def prepare(self, wanted: Wanted) -> float:
        """Store a program in the cache; the host may lack its devices.

        Return the compilation time in seconds, or 0 if the cache already has the program.
        """
        place = self._place(wanted)
        assert place is not None
        if self._kept.has(place):
            return 0.0
        started = time.perf_counter()
        executable = self._compiled(wanted)
        seconds = time.perf_counter() - started
        self._kept.keep(place, executable)
        return seconds

    def log_dropped(self) -> None:
        """Log why cache entries were not used, each reason once per load."""
        self._kept.log_dropped()

    def lowered(self, wanted: Wanted) -> jax.stages.Lowered:
        """Return the lowered module; the host may lack its devices."""
        # A new jitted function for each program, because it caches the lowered module.
        model = function(self._source.exported, self._packing)
        return jax.jit(model, out_shardings=wanted.outputs).lower(wanted.leaves, wanted.inputs)

    def _compiled(self, wanted: Wanted) -> jax.stages.Compiled:
        self.compiled += 1
        compiled: jax.stages.Compiled = self._compilation.options.compiled(
            self.lowered(wanted), wanted.site
        )
        return compiled

    def _compiled_somewhere(
        self, wanted: Wanted, check_cancelled: Callable[[], None], *, is_niced: bool
    ) -> tuple[jax.stages.Compiled, bytes]:
        """Compile in a compiler process or here; return the program and its serialized form."""
        processes = self._compilation.processes
        # Accelerators: another process cannot use their devices.
        if processes is not None and wanted.site.platform == "cpu":
            try:
                return self._compiled_elsewhere(
                    processes, wanted, check_cancelled, is_niced=is_niced
                )
            except Refused as refused:
                self._tell("compiled in the server", str(refused))
        return self._compiled(wanted), b""

    def _compiled_elsewhere(
        self,
        processes: CompilerProcesses,
        wanted: Wanted,
        check_cancelled: Callable[[], None],
        *,
        is_niced: bool,
    ) -> tuple[jax.stages.Compiled, bytes]:
        device, *more = wanted.site.devices
        if wanted.site.rules or more:
            raise Refused("it is sharded")
        described = self._described(wanted)
        job = Job(
            self._of["model"],
            self._source.key,
            device.id,
            packed(self._packing),
            tuple(_array(leaf) for leaf in wanted.leaves),
            tuple(_array(one) for one in wanted.inputs),
            described.program,
            described.environment,
            is_niced,
        )
        try:
            written = processes.compile(job, self._artifact, check_cancelled)
        except CompilationError as error:
            raise JaxRuntimeError(str(error)) from error
        try:
            executable = self._loaded(written, wanted)
        # XLA raises errors of many classes for a program that it cannot load.
        except Exception as error:
            raise Refused(f"it cannot be loaded: {first_line(error)}") from error
        self.compiled += 1
        return executable, written

    def _artifact(self) -> bytes:
        return bytes(self._source.exported.serialize())

    def _tell(self, event: str, reason: str) -> None:
        """Log a message once per load."""
        if (message := f"{event}: {reason}") not in self._logged:
            _log.info(event, **self._of, reason=reason)
        self._logged.add(message)

    def _options(self, site: Site) -> CompilerOptions:
        return self._compilation.options.key(site.platform, len(site.devices))

    def key(self, wanted: Wanted) -> Hashable:
        """Return the key of a program within its computation and this process."""
        site = wanted.site
        # Without partition rules, shardings follow from the computation, packing and device.
        leaves = wanted.leaves if site.rules else ()
        return cache_key.in_process(
            site,
            self._packing.text,
            [*leaves, *wanted.inputs],
            wanted.outputs,
            self._options(site),
        )

    # --- the cache ---

    def _place(self, wanted: Wanted) -> ProgramKey | None:
        return self._described(wanted) if self._compilation.is_kept else None

    def _described(self, wanted: Wanted) -> ProgramKey:
        """Return the program's key in the cache."""
        arguments = [*wanted.leaves, *wanted.inputs]
        return self._kept.described(
            wanted.site, self._source.key, self._packing.text, arguments, wanted.outputs
        )

    def _loaded(self, data: bytes, wanted: Wanted) -> jax.stages.Compiled:
        leaves = ([0] * len(wanted.leaves), [0] * len(wanted.inputs))
        takes = jax.tree.structure((leaves, {}))
        returns = jax.tree.structure([0] * len(self._source.exported.out_avals))
        return serialized.loaded(data, takes, returns, wanted.site.devices)


def function(
    exported: Exported, packing: Packing
) -> Callable[[Sequence[jax.Array], Sequence[jax.Array]], list[jax.Array]]:
    """Return the artifact as a function of packed parameters and inputs."""

    def model(leaves: Sequence[jax.Array], inputs: Sequence[jax.Array]) -> list[jax.Array]:
        parameters = packing.unpack(leaves)
        args, kwargs = jax.tree.unflatten(exported.in_tree, [*parameters, *inputs])
        # Only called while tracing for jit: each call outside leaks some megabytes.
        return jax.tree.leaves(exported.call(*args, **kwargs))

    return model


def packed(packing: Packing) -> Packed:
    return Packed(
        packing.count,
        tuple((dtype.name, elements) for dtype, elements in packing.buffers),
        {
            index: (place.buffer, place.start, place.stop, tuple(place.shape))
            for index, place in packing.places.items()
        },
        tuple(sorted(packing.turned)),
    )


def _array(one: Any) -> Array:
    return Array(one.dtype.name, tuple(one.shape))
