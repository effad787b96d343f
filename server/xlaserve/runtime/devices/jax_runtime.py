"""JAX configuration of this process: platform, precision, and release of memory."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import gc
import os
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import jax
import jax.export
import jax.monitoring
import structlog

from xlaserve.artifact import custom_calls
from xlaserve.errors import DeviceUnavailable
from xlaserve.process import allocator
from xlaserve.runtime.devices import device_problems
from xlaserve.runtime.programs import cache_key
from xlaserve.runtime.programs.compilation_cache import CompilationCache

PLATFORMS = ("cpu", "cuda", "tpu")
"""Platform names, as JAX's export uses them."""

_BEFORE_THE_BACKEND_STARTS = (
    # Without this, JAX silently converts 64-bit tensors to 32-bit.
    ("jax_enable_x64", True),
    # Handing a computation to another thread costs more than a small model takes to run. JAX runs
    # large computations asynchronously regardless, and ignores the environment variable of this
    # name.
    ("jax_cpu_enable_async_dispatch", False),
)

_RELEASES_PER_CLEARING = 8
"""JAX's caches are cleared at every Nth release that follows new traces."""
_TRACED = "jaxpr_trace"
"""Common part of the names of JAX's tracing events (jax.monitoring)."""

_log = structlog.get_logger("device")


_MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""XLA's environment variables for the memory fraction. XLA refuses to start if both are set."""


def start(
    device: str, cache: CompilationCache | None = None, *, memory_fraction: float | None = None
) -> str:
    """Start JAX on `auto`, `cpu`, `cuda` or `tpu` and return the platform that it runs on.

    The compilation cache is usable afterwards; further calls only trim it to its limits. On a GPU,
    XLA may use at most `memory_fraction` of the memory, unless one of XLA's environment variables
    sets the fraction. Raises DeviceUnavailable if JAX runs on another platform than requested (JAX
    itself falls back to the CPU), and InvalidSettings for an unusable cache.
    """
    if device not in ("auto", *PLATFORMS):
        raise DeviceUnavailable(device, f"expected auto, {', '.join(PLATFORMS)}")
    # XLA reads this at startup. Models come and go, so allocate device memory on demand instead of
    # reserving most of it upfront.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name, value in _BEFORE_THE_BACKEND_STARTS:
        jax.config.update(name, value)
    if memory_fraction and not any(os.environ.get(name) for name in _MEMORY_FRACTIONS):
        os.environ[_MEMORY_FRACTIONS[0]] = str(memory_fraction)
    with device_problems.heard() as messages:
        platform = _start_backend(device, messages)
    custom_calls.register()
    if device not in ("auto", platform):
        raise DeviceUnavailable(device, device_problems.reason(device, platform, messages))
    for text in messages if device == "auto" else ():
        # The plugin is installed, so the operator probably expects an accelerator.
        _log.warning("device not used", reason=device_problems.reason("cuda", platform, [text]))
    if cache is not None:
        kind = str(jax.local_devices(backend=platform)[0].device_kind)
        cache.prepare(cache_key.target_of(platform, kind))
        if platform == "cuda":
            cache.prepare_autotuning()
    _spare_the_collector()
    return platform


@cache
def _spare_the_collector() -> None:
    """Exempt JAX's objects from garbage collection; call once, before any model is loaded.

    These objects live until the process exits, and scanning them stops every thread for about 40
    ms.
    """
    # Do not check gc.get_freeze_count(): counting the frozen objects takes longer than this.
    gc.collect()
    gc.freeze()


def _start_backend(device: str, messages: Sequence[str]) -> str:
    # Only some versions of JAX declare this attribute.
    before = cast("Any", jax.config).jax_platforms
    if device != "auto":
        jax.config.update("jax_platforms", "cpu" if device == "cpu" else f"{device},cpu")
    try:
        return jax.export.default_export_platform()
    except (RuntimeError, AssertionError) as error:
        jax.config.update("jax_platforms", before)
        found = [*messages, str(error)]
        raise DeviceUnavailable(device, device_problems.reason(device, "none", found)) from error


class Traces:
    """Clears JAX's trace caches after enough models have been unloaded."""

    def __init__(self) -> None:
        self._is_new = False
        """Whether JAX has traced a function since the last release."""
        self._releases = 0
        """Number of releases after new traces since the caches were last cleared."""

    def heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Note a tracing event. A listener of jax.monitoring; runs on any thread."""
        if _TRACED in event:
            self._is_new = True

    def release(self) -> None:
        """Clear JAX's caches at every eighth release that follows new traces.

        jax 0.12 keeps about 1 MB of traces per load. Compiled programs belong to the models and are
        unaffected, though the next call of each takes a millisecond longer. Clearing holds the GIL
        for about 40 ms. If other processes compile, this one traces nothing and never clears.
        """
        self._releases += self._is_new
        self._is_new = False
        if self._releases >= _RELEASES_PER_CLEARING:
            self._releases = 0
            jax.clear_caches()


_traces = Traces()
jax.monitoring.register_event_duration_secs_listener(_traces.heard)


def release_memory() -> None:
    """Return memory of unloaded models to the operating system. Takes about 30 ms."""
    _traces.release()
    gc.collect()
    # glibc keeps freed pages: without this, 200 MB of parameters would stay resident.
    allocator.trim()
