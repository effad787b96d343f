"""Node.js programs that tests run, with their packages."""

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest

from support.tools import missing, program

INSTALL_SECONDS = 300


def node_program(config: pytest.Config, folder: Path, script: str) -> tuple[str, str]:
    """Return the command that runs a script in a folder with a package.json."""
    node = program("node")
    return node, str(node_packages(config, folder, script) / script)


def node_packages(config: pytest.Config, folder: Path, *scripts: str) -> Path:
    """Install the packages of a package.json and copy these scripts; return the folder."""
    npm = program("npm")
    installed = Path(config.cache.mkdir("npm-programs")) / folder.name
    installed.mkdir(exist_ok=True)
    # Another process of the run may be installing.
    with (installed.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        package = installed / "package.json"
        wanted = (folder / "package.json").read_text()
        if not package.exists() or package.read_text() != wanted:
            _install(npm, installed, wanted)
        for script in scripts:
            shutil.copy(folder / script, installed)
    return installed


def _install(npm: str, folder: Path, wanted: str) -> None:
    package = folder / "package.json"
    package.write_text(wanted)
    ended = subprocess.run(
        [npm, "install", "--silent", "--no-fund", "--no-audit", "--no-package-lock"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS,
        check=False,
    )
    if ended.returncode:
        package.unlink()
        missing(f"npm cannot install what {folder.name} needs: {ended.stderr.strip()[-200:]}")
