"""JAX as this process uses it: which device, which precision, and giving memory back."""

# Much of jax is typed, but not all that is called here.
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
"""The devices by the names that JAX exports for."""

_BEFORE_THE_BACKEND_STARTS = (
    # Off by default, and then JAX turns 64-bit tensors into 32-bit ones without a word.
    ("jax_enable_x64", True),
    # Handing a computation to another thread costs more than a small model takes; a large one
    # stays asynchronous regardless. JAX ignores the environment variable of the same name.
    ("jax_cpu_enable_async_dispatch", False),
)

_RELEASES_PER_CLEARING = 8
"""Releases after new traces per clearing of JAX's caches."""
_TRACED = "jaxpr_trace"
"""Part of the names of JAX's tracing events (jax.monitoring)."""

_log = structlog.get_logger("device")


_MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""XLA's own variables for it. It refuses to start where both are set."""


def start(
    device: str, cache: CompilationCache | None = None, *, memory_fraction: float | None = None
) -> str:
    """Start JAX on `auto`, `cpu`, `cuda` or `tpu` and return the platform that it runs on.

    The cache may be used from then on; each further call brings it within bounds, and changes
    nothing else. A GPU gives XLA the `memory_fraction` of its memory at most, unless a variable of
    XLA's says how much. Raises DeviceUnavailable where the platform is not the one asked for: JAX
    itself would go on with the CPU. Raises InvalidSettings for a cache that cannot be used.
    """
    if device not in ("auto", *PLATFORMS):
        raise DeviceUnavailable(device, f"expected auto, {', '.join(PLATFORMS)}")
    # Read by XLA when it starts: models come and go, so take device memory as they need it
    # instead of most of it at once.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name, value in _BEFORE_THE_BACKEND_STARTS:
        jax.config.update(name, value)
    if memory_fraction and not any(os.environ.get(name) for name in _MEMORY_FRACTIONS):
        os.environ[_MEMORY_FRACTIONS[0]] = str(memory_fraction)
    with device_problems.heard() as said:
        platform = _start_backend(device, said)
    custom_calls.register()
    if device not in ("auto", platform):
        raise DeviceUnavailable(device, device_problems.reason(device, platform, said))
    for text in said if device == "auto" else ():
        # Its wheels are installed, so somebody wanted it.
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
    """Leave what JAX consists of out of garbage collections, once, before there are models.

    It never goes, and looking at all of it stops every thread for some 40 ms.
    """
    # To ask gc whether this was done takes longer than doing it: it counts all that is frozen.
    gc.collect()
    gc.freeze()


def _start_backend(device: str, said: Sequence[str]) -> str:
    # Some versions of JAX declare the attribute, others do not.
    before = cast("Any", jax.config).jax_platforms
    if device != "auto":
        jax.config.update("jax_platforms", "cpu" if device == "cpu" else f"{device},cpu")
    try:
        return jax.export.default_export_platform()
    except (RuntimeError, AssertionError) as error:
        jax.config.update("jax_platforms", before)
        found = [*said, str(error)]
        raise DeviceUnavailable(device, device_problems.reason(device, "none", found)) from error


class Traces:
    """Traces that JAX keeps until its caches are cleared."""

    def __init__(self) -> None:
        self._is_new = False
        """Whether something was traced since the last release."""
        self._releases = 0
        """Releases after new traces, since the caches were cleared."""

    def heard(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Record an event of JAX; in any thread."""
        if _TRACED in event:
            self._is_new = True

    def release(self) -> None:
        """Clear JAX's caches with every eighth release, if functions were traced since.

        jax 0.12 keeps about a megabyte of it for each load. What is compiled is ours and stays; its
        next call takes a millisecond more. To clear them keeps Python's lock for some 40 ms: where
        other processes compile, nothing is traced here and nothing needs to be cleared.
        """
        self._releases += self._is_new
        self._is_new = False
        if self._releases >= _RELEASES_PER_CLEARING:
            self._releases = 0
            jax.clear_caches()


_traces = Traces()
jax.monitoring.register_event_duration_secs_listener(_traces.heard)


def release_memory() -> None:
    """Give memory of dropped models back to the operating system. Takes some 30 ms."""
    _traces.release()
    gc.collect()
    # glibc keeps freed pages for itself: 200 MB of parameters would stay resident.
    allocator.trim()
