"""A model that a client sent is first loaded by a process that may die of it.

The reader of artifacts is compiled code: bytes that were made to do harm, with checksums to match,
can end the process. `python -m xlaserve.models.trial DIRECTORY` loads one model and exits.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from xlaserve.errors import InvalidModel, XlaserveError
from xlaserve.models import manifest

# -P: what lies in the working directory is not imported.
COMMAND = (sys.executable, "-P", "-m", "xlaserve.models.trial")
_READ_BY_JAX = (manifest.ARTIFACT, manifest.STABLEHLO)
_REFUSED = 3
_SHOWN_CHARACTERS = 500


def try_loading(directory: Path, seconds: float, command: Sequence[str] = COMMAND) -> None:
    """Return if a process of its own can load the artifact of a version directory. Blocks.

    Raises InvalidModel where it is refused, where the process dies of it, or takes longer. A
    directory without an artifact holds nothing to try.
    """
    if not any((directory / name).exists() for name in _READ_BY_JAX):
        return
    try:
        trial = subprocess.run(
            [*command, str(directory)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"a trial load did not end in {seconds:g} seconds (trial_seconds)"
        raise InvalidModel(text) from None
    if trial.returncode == _REFUSED:
        raise InvalidModel(trial.stdout.strip()[:_SHOWN_CHARACTERS])
    if trial.returncode < 0:
        name = signal.Signals(-trial.returncode).name
        raise InvalidModel(f"the artifact ends the process that reads it ({name})")
    if trial.returncode:
        raise InvalidModel(f"a trial load failed with exit status {trial.returncode}")


def main(directory: Path) -> int:
    """Load a version directory on the CPU, for one row, and say what is wrong with it."""
    from xlaserve.models import jax_runtime, loaders
    from xlaserve.models.config import ModelConfig
    from xlaserve.models.loaded import LoadContext

    try:
        described = manifest.read(directory)
        device = jax_runtime.start("cpu")
        config = ModelConfig(max_batch_size=1 if described.max_batch_size else 0)
        loaders.load(directory, LoadContext("trial", "1", config, device)).close()
    except XlaserveError as error:
        print(error)  # noqa: T201, the parent reads it
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
