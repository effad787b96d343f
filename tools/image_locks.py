"""Write the lock files of the images: every installed package with its hashes.

    python tools/image_locks.py

Needs uv and a configured package index. tests/deploy/test_images.py compares the files with
pyproject.toml, without checking for newer versions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import locks

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "locks"
PYTHON = "3.12"
"""Version of Python in the images."""
_SERVING = ("generation", "jwt", "onnx", "otel")
EXTRAS: Mapping[str, Sequence[str]] = {"cpu": _SERVING, "cuda12": (*_SERVING, "cuda12")}
"""The lock files, each with the server's optional dependencies that it includes."""
BUILD = ("hatchling", "cyclonedx-bom")
"""Packages that build the wheel and the image's SBOM; the image does not contain them."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, extras in EXTRAS.items():
        _lock(name, ROOT / "pyproject.toml", *(f"--extra={extra}" for extra in extras))
    with TemporaryDirectory() as directory:
        wanted = Path(directory, "build.in")
        wanted.write_text("\n".join(BUILD))
        _lock("build", wanted)


def _lock(name: str, wanted: Path, *options: str) -> None:
    hashes = ("--generate-hashes", "--only-binary=:all:", f"--python-version={PYTHON}")
    locks.write(FOLDER / f"{name}.txt", str(wanted), *options, "--universal", *hashes)


if __name__ == "__main__":
    main()
