"""The compilation of programs: their cache, and XLA's options for a GPU. Needs no JAX."""

import os
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

from xlaserve.errors import InvalidSettings
from xlaserve.models.compilation_cache import AUTOTUNE, SETTING, CompilationCache
from xlaserve.models.compilers.pool import CompilerProcesses, Limits
from xlaserve.models.conversions import ConversionLimits, Conversions
from xlaserve.settings import Settings

AUTO, NO_CACHE = "auto", "none"
"""Values that may stand for a directory in `compilation_cache_directory`."""

AUTOTUNE_OPTION = "xla_gpu_per_fusion_autotune_cache_dir"
"""The one option that changes no program that is compiled already."""

_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_WITHOUT_EFFECT = (
    "--xla_dump",
    "--xla_force_host_platform_device_count",
    "--xla_gpu_cuda_data_dir",
    "--xla_gpu_per_fusion_autotune_cache_dir",
)
"""Prefixes of flags that change no program."""

_URL = "://"
_IDLE_SECONDS = 60.0
"""After which a process that compiles is ended: it holds some 300 MB, and to start one takes more
than a second of a core."""
_GPU_PREFIX = "gpu_"
_NEVER = 2**31 - 1
"""Fewest operations of a command buffer, where there is to be none."""


@dataclass(frozen=True, slots=True)
class XlaOptions:
    """The operator's options of the programs for GPUs; other platforms ignore all of them."""

    command_buffers: bool = True
    latency_hiding: bool = True
    autotune_directory: str = ""
    """Directory in which XLA keeps which kernels were quickest; empty for none."""

    def for_site(self, platform: str, devices: int) -> dict[str, bool | int | str]:
        """Return the options of a program over so many devices, by XLA's names for them."""
        options: dict[str, bool | int | str] = {}
        if platform != "cuda":
            return options
        if not self.command_buffers:
            options["xla_gpu_graph_min_graph_size"] = _NEVER
        if self.latency_hiding and devices > 1:
            options["xla_gpu_enable_latency_hiding_scheduler"] = True
        if self.autotune_directory:
            options[AUTOTUNE_OPTION] = self.autotune_directory
        return options


@dataclass(frozen=True, slots=True)
class Compilation:
    """The compilation options of all loads of a server."""

    cache: CompilationCache | None = None
    """None where no program outlives the process."""
    options: XlaOptions = field(default_factory=XlaOptions)
    conversions: Conversions = field(default_factory=Conversions)
    """Models that loads convert."""
    processes: CompilerProcesses | None = None
    """Those that compile for loads; None where the server does."""
    is_ahead: bool = False
    """Whether it is for devices that are not there."""
    server_flags: str = ""
    """With `is_ahead`: the flags of XLA where the programs are used, as `flags` has them.
    To compile for what is not there takes others."""


def flags() -> str:
    """Return the flags of XLA that this process was started with and may change a program."""
    words = [word for name in _FLAG_VARIABLES for word in os.environ.get(name, "").split()]
    return " ".join(sorted({word for word in words if not word.startswith(_WITHOUT_EFFECT)}))


def of_settings(settings: Settings, *, compare: bool = False, processes: int = 0) -> Compilation:
    """Return what an operator decided; with `compare` what is converted is compared, too.

    So many `processes` compile for loads, once they are asked for. Raises InvalidSettings for a
    cache that is no directory.
    """
    cache = None
    text = settings.compilation_cache_directory
    if _URL in text:
        # As a path it would be a directory of that name, which nobody looks for.
        expected = "a directory; object storage can be mounted as one (docs/models.md)"
        raise InvalidSettings(SETTING, expected, text)
    if text not in ("", NO_CACHE):
        directory = Path.home() / ".cache" / "xlaserve" if text == AUTO else Path(text)
        cache = CompilationCache(directory, settings.compilation_cache_max_bytes)
    autotune = ""
    if cache is not None and settings.gpu_autotune_cache:
        autotune = str(cache.directory / AUTOTUNE)
    options = XlaOptions(
        command_buffers=settings.gpu_command_buffers,
        latency_hiding=settings.gpu_latency_hiding_scheduler,
        autotune_directory=autotune,
    )
    sizes = ConversionLimits(settings.conversion_cache_max_bytes, settings.max_conversion_bytes)
    conversions = Conversions(cache, sizes, settings.scratch_directory, compare=compare)
    limits = Limits(processes, settings.compile_process_bytes, _IDLE_SECONDS, settings.load_seconds)
    return Compilation(
        cache, options, conversions, CompilerProcesses(limits) if processes else None
    )


def without_effect(settings: Settings, platform: str) -> tuple[str, ...]:
    """Return the settings that were changed and do nothing on a platform."""
    if platform == "cuda":
        return ()
    return tuple(
        row.name
        for row in fields(settings)
        if row.name.startswith(_GPU_PREFIX)
        and row.default is not MISSING
        and getattr(settings, row.name) != row.default
    )
