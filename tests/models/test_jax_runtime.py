import ctypes
import gc
import subprocess
import sys
import weakref
from dataclasses import dataclass, field
from functools import partial

import jax
import pytest

from xlaserve.errors import DeviceUnavailable
from xlaserve.runtime.devices import jax_runtime


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_starting_again_changes_nothing(device: str) -> None:
    assert "cpu" == jax_runtime.start(device)


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_device_that_is_not_there_is_refused(device: str) -> None:
    """JAX would silently fall back to the CPU."""
    with pytest.raises(DeviceUnavailable, match=f"device '{device}' is not available: ") as caught:
        jax_runtime.start(device)

    assert "is not installed: pip install 'xlaserve[" in str(caught.value)

    assert "cpu" == jax_runtime.start("cpu")


def test_unknown_device_is_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="expected auto, cpu, cuda, tpu"):
        jax_runtime.start("gpu")


def test_sixty_four_bits_are_sixty_four_bits() -> None:
    assert jax.numpy.int64 == jax.numpy.asarray(2**40).dtype


def test_settings_are_there_before_the_backend_starts() -> None:
    code = """
import os, jax
from xlaserve.runtime.devices import jax_runtime
before = jax._src.xla_bridge.backends_are_initialized()
print(before, jax_runtime.start("cpu"), jax.config.jax_enable_x64,
      jax.config.read("jax_cpu_enable_async_dispatch"),
      os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert "False cpu True False false" == found.stdout.strip()


@pytest.mark.slow
def test_device_that_is_not_there_is_refused_at_the_start() -> None:
    code = """
from xlaserve.errors import DeviceUnavailable
from xlaserve.runtime.devices import jax_runtime
for device in ("tpu", "gpu"):
    try:
        jax_runtime.start(device)
    except DeviceUnavailable as error:
        print(type(error).__name__)
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert ["DeviceUnavailable"] * 2 == found.stdout.split()


class Cycle:
    """An object that only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


@dataclass
class Glibc:
    """A stand-in for the C library."""

    kept: list[int] = field(default_factory=list)

    def malloc_trim(self, kept_bytes: int) -> None:
        """Record the number of bytes to keep."""
        self.kept.append(kept_bytes)


def test_each_release_collects_garbage_and_gives_its_pages_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    glibc = Glibc()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: glibc)
    gc.disable()
    left = []
    for _ in range(3):
        held = weakref.ref(Cycle())
        jax_runtime.release_memory()
        left.append(held())
    gc.enable()

    assert [None] * 3 == left
    assert [0] * 3 == glibc.kept


def test_what_jax_traced_is_dropped_with_every_eighth_release_that_follows_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the traces would accumulate; other releases must not stop all threads for it."""
    jax_runtime.release_memory()
    monkeypatch.setattr(jax_runtime._traces, "_releases", 0)
    cleared = list[int]()
    for release in range(1, 25):
        monkeypatch.setattr(jax, "clear_caches", partial(cleared.append, release))
        jax.monitoring.record_event_duration_secs("/jax/something_else", 1.0)
        if release <= 8 or release % 2:
            jax.jit(lambda x: x + 1).trace(float(release))
        jax_runtime.release_memory()

    assert [8, 23] == cleared


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_a_c_library_that_keeps_its_pages_is_no_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    asked = []

    def refuse(name: str | None) -> object:
        asked.append(name)
        raise error

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    jax_runtime.release_memory()

    assert [None] == asked


def test_jax_itself_is_left_out_of_garbage_collections() -> None:
    """Objects are frozen only once: a frozen object is never collected, and models come later."""
    frozen = gc.get_freeze_count()

    jax_runtime.start("cpu")

    assert 0 < frozen == gc.get_freeze_count()
