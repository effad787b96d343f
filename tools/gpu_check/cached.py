"""Checks that a load uses programs from the cache, compiled with the device or without it.

`xlaserve warm --target` compiles without the device during an image build. Only the device can show
that such programs run on it.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_check.device import Device, Options, calls_per_second, inputs_of, let_go
from gpu_check.findings import Finding, judged, measured, unknown
from xlaserve.runtime.devices import device
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.runtime.programs import compilation
from xlaserve.settings import Settings


def check_cached(found: Device, options: Options) -> Iterator[Finding]:
    """Load a model twice with one cache, then with a cache that was filled without the device."""
    directory = options.directories[0]
    with tempfile.TemporaryDirectory() as folder:
        here = _load(found, options, Path(folder))
        again = _load(found, options, Path(folder))
        yield judged(
            "compilation cache", "made here", again.compiled == 0 and again.cached == here.compiled,
            f"{here.compiled} programs compiled, then {again.compiled} compiled and {again.cached} "
            "found",
            compiled=here.compiled, compiled_again=again.compiled, found=again.cached,
            seconds=here.seconds, seconds_again=again.seconds,
        )  # fmt: skip
    target = _target(found)
    if not target:
        yield unknown("compilation cache", "made ahead", f"no target is known for {found.kind}")
        return
    with tempfile.TemporaryDirectory() as folder:
        problem = _warm(directory.parent.parent, target, found.count, Path(folder))
        if problem:
            yield unknown("compilation cache", "made ahead", problem)
            return
        ahead = _load(found, options, Path(folder))
        yield judged(
            "compilation cache", "made ahead", ahead.compiled == 0,
            f"for {target}, without the device: {ahead.cached} programs used, {ahead.compiled} "
            "compiled anew",
            target=target, found=ahead.cached, compiled=ahead.compiled, seconds=ahead.seconds,
        )  # fmt: skip
        yield measured(
            "tuned kernels", directory.parent.name,
            f"{here.rows_per_second:.0f} rows/s compiled here, {ahead.rows_per_second:.0f} ahead",
            here_rows_per_second=here.rows_per_second, ahead_rows_per_second=ahead.rows_per_second,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Load:
    compiled: int
    cached: int
    seconds: float
    rows_per_second: float
    """Throughput at the largest batch size; without a device, programs are not autotuned."""


def _load(found: Device, options: Options, cache: Path) -> _Load:
    directory = options.directories[0]
    settings = Settings.read({}, repository=directory, compilation_cache_directory=str(cache))
    made = compilation.of_settings(settings)
    device.start(found.platform, made.cache)
    started = time.perf_counter()
    model = found.load(directory, directory.parent.name, compilation=made)
    seconds = time.perf_counter() - started
    info, rows = model.info, model.info.buckets[-1].rows
    speed = calls_per_second(partial(model.execute, inputs_of(model, rows)), options.seconds)
    let_go(model)
    return _Load(info.compiled_programs, info.cached_programs, seconds, speed * max(1, rows))


def _target(found: Device) -> str:
    row = kinds.of_kind(found.platform, found.kind)
    return row.name if row else "cpu" if found.platform == "cpu" else ""


def _warm(repository: Path, target: str, count: int, cache: Path) -> str:
    """Fill a cache in a separate process; return the reason if that is not possible."""
    options = ("--target", target, "--count", str(count), "--cache", str(cache))
    ran = subprocess.run(
        [sys.executable, "-m", "xlaserve", "warm", str(repository), *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if ran.returncode == 0 else (ran.stderr.strip().splitlines() or ["it failed"])[-1]
