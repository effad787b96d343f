"""Whether a load uses what was compiled before: by a process with the device, and by one without.

The second is what `xlaserve warm --target` does in the build of an image. That its programs run on
the device they were made for is what cannot be known without one.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpu_check.device import Device, Options, let_go
from gpu_check.findings import Finding, judged, unknown
from xlaserve.models import compilation, device
from xlaserve.settings import Settings


def check_cached(found: Device, options: Options) -> Iterator[Finding]:
    """Load a model twice with a cache, then with one that was filled without the device."""
    directory = options.directories[0]
    with tempfile.TemporaryDirectory() as folder:
        first = _load(found, directory, Path(folder))
        second = _load(found, directory, Path(folder))
        yield judged(
            "compilation cache", "made here", second[0] == 0 and second[1] == first[0],
            f"{first[0]} programs compiled, then {second[0]} compiled and {second[1]} found",
            compiled=first[0], compiled_again=second[0], found=second[1],
        )  # fmt: skip
    target = _target(found)
    if not target:
        yield unknown("compilation cache", "made ahead", f"no target is known for {found.kind}")
        return
    with tempfile.TemporaryDirectory() as folder:
        problem = _warm(directory.parent.parent, target, Path(folder))
        if problem:
            yield unknown("compilation cache", "made ahead", problem)
            return
        compiled, used = _load(found, directory, Path(folder))
        yield judged(
            "compilation cache", "made ahead", compiled == 0,
            f"for {target}, without the device: {used} programs used, {compiled} compiled anew",
            target=target, found=used, compiled=compiled,
        )  # fmt: skip


def _load(found: Device, directory: Path, cache: Path) -> tuple[int, int]:
    settings = Settings.read({}, repository=directory, compilation_cache_directory=str(cache))
    made = compilation.of_settings(settings)
    device.start(found.platform, made.cache)
    model = found.load(directory, directory.parent.name, compilation=made)
    info = model.info
    let_go(model)
    return info.compiled_programs, info.cached_programs


def _target(found: Device) -> str:
    return "cpu" if found.platform == "cpu" else ""


def _warm(repository: Path, target: str, cache: Path) -> str:
    """Fill a cache in a process of its own; return why that cannot be."""
    options = ("--target", target, "--cache", str(cache))
    ran = subprocess.run(
        [sys.executable, "-m", "xlaserve", "warm", str(repository), *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if ran.returncode == 0 else (ran.stderr.strip().splitlines() or ["it failed"])[-1]
