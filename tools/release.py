"""Build a release and check it: `tox run -e release`.

    python tools/release.py [--out DIRECTORY]

The version is that of pyproject.toml, and CHANGELOG.md must begin with it. The wheel and the sdist
must pass `twine check`; each is installed into a separate environment, where it must report the
version and check the example models.
"""

import argparse
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "examples" / "models"
_HEADING = re.compile(r"^## \[(\S+)\]", re.MULTILINE)
SECONDS = 600
"""Limit of each command."""


def version() -> str:
    """Return the version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def newest_changes(changelog: str) -> str:
    """Return the version of the first section of a changelog."""
    found = _HEADING.search(changelog)
    return found[1] if found else "none"


def run(*command: str | Path) -> str:
    """Run a command, print it, and return what it printed; raise if it fails."""
    print("$", *command, flush=True)
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS, cwd="/"
    ).stdout


def built(out: Path) -> list[Path]:
    """Build the sdist, and the wheel from it, and check how PyPI would render them."""
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    files = sorted(out.glob(f"xlaserve-{version()}*"))
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return files


def try_installation(file: Path, environment: Path) -> None:
    """Install one file into a fresh environment, and inspect an example model with it."""
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", file)
    said = run(environment / "bin" / "xlaserve", "--version")
    if version() not in said:
        raise SystemExit(f"{file.name} says that it is {said.strip()!r}, expected {version()}")
    print(run(environment / "bin" / "xlaserve", "repo", "check", MODELS))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="where the wheel and the sdist are kept")
    options = parser.parse_args(arguments)
    changes = newest_changes((ROOT / "CHANGELOG.md").read_text())
    if changes != version():
        raise SystemExit(
            f"CHANGELOG.md begins with {changes}, pyproject.toml has {version()}: change one"
        )
    with TemporaryDirectory(prefix="release-") as temporary:
        out = (options.out or Path(temporary) / "dist").absolute()
        for number, file in enumerate(built(out)):
            try_installation(file, Path(temporary) / str(number))
            print(f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB, installed and tried")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
