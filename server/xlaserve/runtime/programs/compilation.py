"""The compilation of programs: their cache, and XLA's options for a GPU. Needs no JAX."""

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.runtime.programs.compilation_cache import AUTOTUNE, SETTING, CompilationCache
from xlaserve.runtime.programs.compilers.pool import CompilerProcesses, Limits
from xlaserve.runtime.programs.conversions import ConversionLimits, Conversions
from xlaserve.runtime.programs.program_counts import ProgramCounts
from xlaserve.runtime.programs.program_store import READ_ONLY, ProgramStore
from xlaserve.runtime.programs.program_store import SETTING as URL_SETTING
from xlaserve.settings import Settings
from xlaserve.settings.cache_home import cache_home
from xlaserve.settings.choices import MatmulPrecision
from xlaserve.storage.stores import StoreLimits, open_store
from xlaserve.storage.urls import check_url

AUTO, NO_CACHE = "auto", "none"
"""Keywords in place of a directory in `compilation_cache_directory`."""

AUTOTUNE_OPTION = "xla_gpu_per_fusion_autotune_cache_dir"
"""The only option that does not change compiled programs."""

_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_WITHOUT_EFFECT = (
    "--xla_dump",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_cuda_data_dir",
    "--xla_gpu_per_fusion_autotune_cache_dir",
)
"""Prefixes of flags that change no program."""

URL = "://"
"""Part of a store's URL, and of no directory's name."""

_CLOSING_SECONDS = 2.0
"""Seconds that the end of a server waits for programs that are not in the store yet."""
_IDLE_SECONDS = 60.0
"""After which a process that compiles is ended: it holds some 300 MB, and to start one takes more
than a second of a core."""
_OF_PLATFORMS: Mapping[str, tuple[str, ...]] = {
    "gpu_": ("cuda",),
    "matmul_precision": ("cuda", "tpu"),
}
"""Prefixes of settings that have an effect on these platforms alone."""
_DAY_SECONDS = 86_400.0
DEFAULT_PRECISION = MatmulPrecision.DEFAULT.of_xla
_NEVER = 2**31 - 1
"""Minimum of operations in a command buffer that disables these."""

CompilerOptions: TypeAlias = dict[str, Any]
"""Options of a program by XLA's names: booleans, integers and texts, which the types of JAX list
incompletely in 0.10."""


@dataclass(frozen=True, slots=True)
class XlaOptions:
    """The operator's options of the programs for accelerators; the CPU ignores all of them."""

    command_buffers: bool = True
    latency_hiding: bool = True
    autotune_directory: str = ""
    """Directory in which XLA keeps which kernels were quickest; empty for none."""
    precision: str = DEFAULT_PRECISION
    """Precision of FP32 products that an artifact leaves open, by XLA's name for it."""

    @classmethod
    def of(cls, settings: Settings, autotune_directory: str = "") -> "XlaOptions":
        """Return the compiler options of these settings."""
        return cls(
            settings.gpu_command_buffers,
            settings.gpu_latency_hiding_scheduler,
            autotune_directory,
            settings.matmul_precision.of_xla,
        )

    def for_site(self, platform: str, devices: int) -> CompilerOptions:
        """Return the options for a program over this many devices, by XLA's names."""
        options: CompilerOptions = {}
        if platform != "cuda":
            return options
        if not self.command_buffers:
            options["xla_gpu_graph_min_graph_size"] = _NEVER
        if self.latency_hiding and devices > 1:
            options["xla_gpu_enable_latency_hiding_scheduler"] = True
        if self.autotune_directory:
            options[AUTOTUNE_OPTION] = self.autotune_directory
        return options

    def precision_for(self, platform: str) -> str:
        """Return the precision of open FP32 products; empty where it cannot be chosen."""
        return self.precision if platform in _OF_PLATFORMS["matmul_precision"] else ""

    def name_for(self, platform: str) -> str:
        """Return JAX's name for that precision."""
        return self.precision_for(platform).lower()

    def key(self, platform: str, devices: int) -> CompilerOptions:
        """Return the options that affect a program over this many devices, for its key."""
        said = self.for_site(platform, devices)
        # Where XLA keeps what it tuned changes no program.
        said.pop(AUTOTUNE_OPTION, None)
        # Older keys have no precision.
        if self.precision_for(platform) not in ("", DEFAULT_PRECISION):
            said["matmul_precision"] = self.precision
        return said

    def compiled(
        self, lowered: Any, site: Any, more: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        """Compile a lowered program for a site with its options, and further ones.

        Every program that a server executes on its devices is compiled here.
        """
        if self.precision_for(site.platform) not in ("", DEFAULT_PRECISION):
            from xlaserve.runtime.programs.precision import set_precision

            set_precision(lowered, self.precision)
        options = {**self.for_site(site.platform, len(site.devices)), **more}
        return lowered.compile(compiler_options=options or None)


@dataclass(frozen=True, slots=True)
class Compilation:
    """The compilation options of all loads of a server."""

    cache: CompilationCache | None = None
    """None where no program outlives the process on this machine."""
    options: XlaOptions = field(default_factory=XlaOptions)
    conversions: Conversions = field(default_factory=Conversions)
    """Models that loads convert."""
    processes: CompilerProcesses | None = None
    """Compiling processes for loads; None if the server compiles itself."""
    is_ahead: bool = False
    """Whether it compiles for absent devices."""
    server_flags: str = ""
    """With `is_ahead`: the XLA flags of the servers that will use the programs, as `flags` returns
    them. Compiling for absent devices requires others.
    """
    tries_here: bool = False
    """Whether row trials run in this process, which they may end."""
    store: ProgramStore | None = None
    """The shared program store, or None."""
    trial_seconds: float = 60.0
    """Processor time of a declared model's row trial without `processes`."""

    @property
    def is_kept(self) -> bool:
        """Tell whether programs outlive the process."""
        return self.cache is not None or self.store is not None

    @property
    def has_no_programs(self) -> bool:
        """Tell whether each program must be compiled; a store may have some. Blocks."""
        return self.store is None and (self.cache is None or self.cache.is_empty)

    @property
    def counts(self) -> Mapping[str, ProgramCounts]:
        """Return the counters of each program cache and store, by its name."""
        places = {"directory": self.cache, "store": self.store}
        return {name: place.counts for name, place in places.items() if place is not None}

    def close(self) -> None:
        """End the processes and the uploads, after a short wait."""
        if self.processes is not None:
            self.processes.close()
        if self.store is not None:
            self.store.close(_CLOSING_SECONDS)


_log = structlog.get_logger("compilation")


def flags() -> str:
    """Return the XLA flags of this process that can affect programs."""
    words = [word for name in _FLAG_VARIABLES for word in os.environ.get(name, "").split()]
    return " ".join(sorted({word for word in words if not word.startswith(_WITHOUT_EFFECT)}))


def _directory(text: str) -> Path | None:
    """Return the directory of compiled programs, or None."""
    if text in ("", NO_CACHE):
        return None
    if text != AUTO:
        return Path(text)
    try:
        return cache_home("xlaserve", SETTING)
    except InvalidSettings as error:
        # What nobody asked for ends no start.
        _log.warning("compiled programs not kept", reason=str(error))
        return None


def of_settings(settings: Settings, *, compare: bool = False, processes: int = 0) -> Compilation:
    """Return the compilation that the settings describe; `compare` also checks conversions.

    So many `processes` compile for loads, once they are asked for. Raises InvalidSettings for a
    cache that is no directory.
    """
    cache = None
    text = settings.compilation_cache_directory
    if URL in text:
        # As a path it would be a directory of that name, which nobody looks for.
        raise InvalidSettings(SETTING, f"a directory; set URLs in {URL_SETTING}", text)
    directory = _directory(text)
    if directory is not None:
        cache = CompilationCache(
            directory,
            settings.compilation_cache_max_bytes,
            settings.compilation_cache_max_days * _DAY_SECONDS or math.inf,
        )
    autotune = ""
    if cache is not None and settings.gpu_autotune_cache:
        autotune = str(cache.directory / AUTOTUNE)
    options = XlaOptions.of(settings, autotune)
    sizes = ConversionLimits(settings.conversion_cache_max_bytes, settings.max_conversion_bytes)
    conversions = Conversions(cache, sizes, settings.scratch_directory, compare=compare)
    limits = Limits(
        processes,
        settings.compile_process_bytes,
        _IDLE_SECONDS,
        settings.load_seconds,
        settings.trial_seconds or settings.load_seconds,
    )
    return Compilation(
        cache,
        options,
        conversions,
        CompilerProcesses(limits) if processes else None,
        store=store_of(settings),
        trial_seconds=limits.trial_seconds,
    )


def store_of(settings: Settings, *, is_waited_for: bool = False) -> ProgramStore | None:
    """Return the program store of the settings, without connecting to it.

    `is_waited_for`: to fill it is what the process is for. Raises InvalidSettings for a URL that
    may not be used, or cannot be.
    """
    url = settings.compilation_cache_url
    if not url:
        return None
    check_url(URL_SETTING, url, settings.remote_schemes)
    if is_waited_for and url.startswith(READ_ONLY):
        raise InvalidSettings(URL_SETTING, "a writable URL, not http", url)
    limits = StoreLimits(settings.remote_stall_seconds, settings.remote_max_objects)
    return ProgramStore(
        url,
        partial(open_store, url, limits),
        seconds=settings.compilation_cache_url_seconds,
        max_bytes=settings.compilation_cache_max_bytes,
        is_waited_for=is_waited_for,
    )


def without_effect(settings: Settings, platform: str) -> tuple[str, ...]:
    """Return the changed settings without effect on a platform."""
    useless = tuple(name for name, where in _OF_PLATFORMS.items() if platform not in where)
    return tuple(
        row.name
        for row in fields(settings)
        if row.name.startswith(useless)
        and row.default is not MISSING
        and getattr(settings, row.name) != row.default
    )
