"""Go programs that tests run: installed ones, or built once per run if Go is available."""

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.tools import missing

BUILD_SECONDS = 300


def go_program(config: pytest.Config, name: str, package: str, folder: Path | None = None) -> str:
    """Return the path of an installed program, or build it from a package.

    `package` is an import path with its version, or `.` for the module in `folder`.
    """
    if folder is None and (installed := shutil.which(name)):
        return installed
    go = shutil.which("go")
    if go is None:
        missing(f"neither {name} nor Go is installed")
    version = package.partition("@")[2] or "local"
    programs = Path(config.cache.mkdir("go-programs")) / version
    programs.mkdir(exist_ok=True)
    program = programs / name
    # Another process of the run may be building it.
    with (programs / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder is not None or not program.exists():
            _build(go, name, package, programs, folder)
    return str(program)


def go_module(module: str) -> Path:
    """Return the source folder of a module (`path@version`), downloading it if necessary."""
    go = shutil.which("go")
    if go is None:
        missing("Go is not installed")
    done = subprocess.run(
        [go, "mod", "download", "-json", module],
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    found = json.loads(done.stdout or "{}")
    if "Dir" not in found:
        missing(f"{module} cannot be had: {found.get('Error', done.stderr)[-200:]}")
    return Path(found["Dir"])


def _build(go: str, name: str, package: str, programs: Path, folder: Path | None) -> None:
    built = subprocess.run(
        [go, "install", "-buildvcs=false", package],
        cwd=folder,
        env=os.environ | {"GOBIN": str(programs)},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if built.returncode:
        missing(f"{name} cannot be built: {built.stderr.strip()[-200:]}")
