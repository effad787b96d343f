"""Compilation settings: caches, processes, and XLA's GPU options. Does not import JAX."""

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
"""Values of `compilation_cache_directory` that are not directories."""

AUTOTUNE_OPTION = "xla_gpu_per_fusion_autotune_cache_dir"
"""The only option that does not affect compiled programs."""

_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_WITHOUT_EFFECT = (
    "--xla_dump",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_cuda_data_dir",
    "--xla_gpu_per_fusion_autotune_cache_dir",
)
"""Prefixes of flags that do not affect programs."""

URL = "://"
"""Distinguishes a store's URL from a directory."""

_CLOSING_SECONDS = 2.0
"""Maximum time that server shutdown waits for pending uploads to the store."""
_IDLE_SECONDS = 60.0
"""Idle time after which a compiler process is ended. A process holds about 300 MB; starting one
takes more than a second of a core.
"""
_OF_PLATFORMS: Mapping[str, tuple[str, ...]] = {
    "gpu_": ("cuda",),
    "matmul_precision": ("cuda", "tpu"),
}
"""Prefixes of settings that only affect certain platforms, with these platforms."""
_DAY_SECONDS = 86_400.0
DEFAULT_PRECISION = MatmulPrecision.DEFAULT.of_xla
_NEVER = 2**31 - 1
"""Minimum number of operations per command buffer, so high that command buffers are disabled."""

CompilerOptions: TypeAlias = dict[str, Any]
"""Options of a program by XLA's names: booleans, integers and strings. JAX 0.10's type annotations
list them incompletely.
"""


@dataclass(frozen=True, slots=True)
class XlaOptions:
    """The operator's XLA options for accelerators. The CPU ignores all of them."""

    command_buffers: bool = True
    latency_hiding: bool = True
    autotune_directory: str = ""
    """Directory of XLA's autotuning results, or an empty string for none."""
    precision: str = DEFAULT_PRECISION
    """Precision of FP32 products that the artifact does not specify, by XLA's name."""

    @classmethod
    def of(cls, settings: Settings, autotune_directory: str = "") -> "XlaOptions":
        """Return the XLA options in these settings."""
        return cls(
            settings.gpu_command_buffers,
            settings.gpu_latency_hiding_scheduler,
            autotune_directory,
            settings.matmul_precision.of_xla,
        )

    def for_site(self, platform: str, devices: int) -> CompilerOptions:
        """Return the options for a program on this number of devices, by XLA's names."""
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
        """Return the precision of unspecified FP32 products; empty if not selectable."""
        return self.precision if platform in _OF_PLATFORMS["matmul_precision"] else ""

    def name_for(self, platform: str) -> str:
        """Return JAX's name for this precision, or an empty string."""
        return self.precision_for(platform).lower()

    def key(self, platform: str, devices: int) -> CompilerOptions:
        """Return the options that belong in the cache key of a program."""
        options = self.for_site(platform, devices)
        # The directory of autotuning results does not affect programs.
        options.pop(AUTOTUNE_OPTION, None)
        # Omit the default, so that keys from before this option remain valid.
        if self.precision_for(platform) not in ("", DEFAULT_PRECISION):
            options["matmul_precision"] = self.precision
        return options

    def compiled(
        self, lowered: Any, site: Any, more: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        """Compile a lowered program for a site, with the site's options and these.

        All programs that the server executes on its devices are compiled here.
        """
        if self.precision_for(site.platform) not in ("", DEFAULT_PRECISION):
            from xlaserve.runtime.programs.precision import set_precision

            set_precision(lowered, self.precision)
        options = {**self.for_site(site.platform, len(site.devices)), **more}
        return lowered.compile(compiler_options=options or None)


@dataclass(frozen=True, slots=True)
class Compilation:
    """Compilation settings that all loads of a server share."""

    cache: CompilationCache | None = None
    """Cache of compiled programs on this machine, or None."""
    options: XlaOptions = field(default_factory=XlaOptions)
    conversions: Conversions = field(default_factory=Conversions)
    """Cache of models that loads convert from other formats."""
    processes: CompilerProcesses | None = None
    """Pool of compiler processes; None if the server compiles in its own process."""
    is_ahead: bool = False
    """Whether this process compiles for devices that it does not have."""
    server_flags: str = ""
    """With `is_ahead`: the XLA flags of the servers that will use the programs, as returned by
    `flags`. This process itself needs other flags to compile without devices.
    """
    tries_here: bool = False
    """Whether row trials run in this process, which a trial may crash."""
    store: ProgramStore | None = None
    """The shared program store, or None."""
    trial_seconds: float = 60.0
    """Processor time for a row trial without `processes`, in seconds."""

    @property
    def is_kept(self) -> bool:
        """Tell whether compiled programs are kept after the process exits."""
        return self.cache is not None or self.store is not None

    @property
    def has_no_programs(self) -> bool:
        """Tell whether every program must be compiled. False if there is a store. Blocks."""
        return self.store is None and (self.cache is None or self.cache.is_empty)

    @property
    def counts(self) -> Mapping[str, ProgramCounts]:
        """Return the counters of each cache and store of programs, by name."""
        places = {"directory": self.cache, "store": self.store}
        return {name: place.counts for name, place in places.items() if place is not None}

    def close(self) -> None:
        """Stop the processes, and finish pending uploads within a short time."""
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
    """Return the directory of the compilation cache, or None."""
    if text in ("", NO_CACHE):
        return None
    if text != AUTO:
        return Path(text)
    try:
        return cache_home("xlaserve", SETTING)
    except InvalidSettings as error:
        # The cache is on by default, so its failure must not prevent the server from starting.
        _log.warning("compiled programs not kept", reason=str(error))
        return None


def of_settings(settings: Settings, *, compare: bool = False, processes: int = 0) -> Compilation:
    """Return the compilation that the settings describe; `compare` also checks conversions.

    At most `processes` compiler processes start, on demand. Raises InvalidSettings if the cache's
    path is not a directory.
    """
    cache = None
    text = settings.compilation_cache_directory
    if URL in text:
        # As a path, the URL would create a directory with a surprising name.
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

    `is_waited_for`: this process exists to fill the store, so it waits for uploads. Raises
    InvalidSettings for a URL that is invalid or not permitted.
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
    """Return the changed settings that have no effect on a platform."""
    useless = tuple(name for name, where in _OF_PLATFORMS.items() if platform not in where)
    return tuple(
        row.name
        for row in fields(settings)
        if row.name.startswith(useless)
        and row.default is not MISSING
        and getattr(settings, row.name) != row.default
    )
