"""The conditions of a comparison that affect its numbers."""

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from comparison.kit import Kit

_ROOT = Path(__file__).parents[2]
_PACKAGES = {
    "floor": ("grpcio", "protobuf", "jax"),
    "triton": ("nvidia-pytriton", "jax"),
    "mlserver": ("mlserver", "jax"),
    "kserve": ("kserve", "jax"),
}
_OURS = ("jax", "numpy", "uvloop")


def conditions(kit: Kit, peers: tuple[str, ...]) -> dict[str, str]:
    """Return the conditions printed above the table, by name."""
    found = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "pinning": f"every server on core {kit.server_cpu}, the client on core {kit.client_cpu}",
        "xlaserve": f"commit {_commit()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in _OURS),
    }
    for peer in peers:
        python = kit.cache / "venv" / peer / "bin" / "python"
        found[peer] = _versions(python, _PACKAGES.get(peer, ()))
    found["client"] = _output("h2load", "--version") or "h2load"
    return found


def _processor() -> str:
    text = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return named[1] if named else platform.machine()


def _commit() -> str:
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--", "server")
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD") or "unknown"
    return f"{commit} with changes" if changed else commit


def _versions(python: Path, packages: tuple[str, ...]) -> str:
    code = (
        "import platform, sys; from importlib.metadata import version;"
        "print(', '.join(['Python ' + platform.python_version()]"
        " + [name + ' ' + version(name) for name in sys.argv[1:]]))"
    )
    return _output(str(python), "-c", code, *packages) or "unknown"


def _output(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ran.stdout.strip()
