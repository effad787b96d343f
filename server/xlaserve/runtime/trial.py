"""Loads a client's model in a process that it may crash.

Artifacts are parsed by compiled code, and malicious bytes with valid checksums can crash the
process. `python -m xlaserve.runtime.trial DIRECTORY` loads one model and exits.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xlaserve.artifact import manifest, plain_artifact
from xlaserve.artifact.onnx_source import OnnxSource
from xlaserve.errors import InvalidModel, OutOfMemory, XlaserveError
from xlaserve.files.temporary import TemporaryDirectory
from xlaserve.language.confining import FROM_OUTSIDE
from xlaserve.model_config.config import ModelConfig
from xlaserve.process import last_words
from xlaserve.process.children import start_shielded
from xlaserve.process.confinement import confine, limit_processor
from xlaserve.process.endings import end_with_parent
from xlaserve.process.own_time import OwnTime
from xlaserve.process.silence import Stopped

# -P keeps the process from importing modules of the working directory.
COMMAND = (sys.executable, "-P", "-m", "xlaserve.runtime.trial")
_OF_A_SERVER = frozenset({"devices", "placement", "partition", "mesh", "batch_sizes"})
"""Configuration parameters without effect in a trial, which uses one device and one row."""

_READ_BY_JAX = (manifest.ARTIFACT, manifest.STABLEHLO)
_REFUSED = 3
MEMORY_BYTES = 4 << 30
"""Memory limit in addition to JAX's own memory; a server has `compile_process_bytes`."""
FILE_BYTES = 8 << 30
"""Maximum size of one file. A converted model has all parameters in one file."""
OPEN_FILES = 256

_PROCESS = "trial load"
CLOCK_TIMES = 10
"""Maximum ratio of elapsed time to processor time, for a trial that waits for a processor."""
_GRACE_SECONDS = 5.0
"""Time in seconds after the limit at which a trial exits by itself."""
_ATTEMPTS = 2
"""Processes per trial: the model may not be to blame if the first one is killed."""

_SHOWN_CHARACTERS = 500


def try_loading(
    directory: Path,
    seconds: float,
    parameters: Mapping[str, str] | None = None,
    source: OnnxSource | None = None,
    *,
    command: Sequence[str] = COMMAND,
    memory_bytes: int = MEMORY_BYTES,
    begin: Callable[[], None] = lambda: None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> None:
    """Load a version's artifact in another process; returns if that succeeds. Blocks.

    Uses the parameters of the configuration; an ONNX model is converted first. `begin` is called if
    there is something to try, so that preparations for the actual load can start concurrently. Time
    spent waiting for a processor does not count towards `seconds`, up to `CLOCK_TIMES` as much
    elapsed time: a busy machine does not cause a model to be refused.

    Raises InvalidModel if the model is refused, crashes the process or exceeds a limit; and the
    exception of `check_cancelled`, after killing the process. Does nothing for a directory without
    an artifact.
    """
    plain = plain_artifact.find(directory)
    if source is None and not plain and not any((directory / n).exists() for n in _READ_BY_JAX):
        return
    begin()
    job = {
        "parameters": dict(parameters or {}),
        "onnx": source and {**asdict(source), "path": str(source.path)},
    }
    limits = seconds * CLOCK_TIMES + _GRACE_SECONDS, seconds + _GRACE_SECONDS, memory_bytes
    arguments = str(directory), *map(str, limits), str(os.getpid())
    for _ in range(_ATTEMPTS):
        # Not as an argument: arguments are limited in size, and other users can read them.
        trial = _run([*command, *arguments], json.dumps(job), seconds, check_cancelled)
        if trial is not None:
            break
    else:
        raise InvalidModel("a trial load was stopped (SIGSTOP), or killed from outside, twice")
    if trial.returncode == _REFUSED:
        raise InvalidModel(trial.stdout.strip()[:_SHOWN_CHARACTERS])
    if trial.returncode:
        last_words.tell(_PROCESS, last_words.how(trial.returncode), trial.stderr)
    if trial.returncode in {-signal.SIGXCPU, -signal.SIGALRM}:
        raise InvalidModel(_late(seconds))
    if trial.returncode < 0:
        name = last_words.how(trial.returncode)
        what = "artifact" if source is None else f"file {source.path.name}"
        raise InvalidModel(f"the {what} crashed the process that loaded it on trial ({name})")
    if trial.returncode:
        raise InvalidModel(
            f"a trial load failed with exit status {trial.returncode}"
            f"{_behind(last_words.last_line(trial.stderr))}"
        )


def _run(
    command: Sequence[str], given: str, seconds: float, check_cancelled: Callable[[], None]
) -> "subprocess.CompletedProcess[str] | None":
    """Return the exit status and output of a process, or None if someone else killed it.

    Raises InvalidModel on timeout, or the exception of `check_cancelled`.
    """
    unsent: str | None = given
    process = start_shielded(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    with process:
        stopped, had = Stopped(process.pid), OwnTime(process.pid)
        until = time.monotonic() + CLOCK_TIMES * seconds
        try:
            while not stopped.is_over:
                left = min(seconds - had.seconds, until - time.monotonic())
                try:
                    printed = process.communicate(unsent, max(0.0, min(left, stopped.step)))
                except subprocess.TimeoutExpired as expired:
                    check_cancelled()
                    had.look()
                    if had.seconds >= seconds or left <= 0:
                        text = _late(seconds) if had.seconds >= seconds else _starved(had, seconds)
                        last_words.tell(_PROCESS, f"killed: {text}", expired.stderr)
                        raise InvalidModel(text) from None
                else:
                    if -process.returncode in FROM_OUTSIDE:
                        last_words.tell(_PROCESS, last_words.how(process.returncode), printed[1])
                        return None
                    return subprocess.CompletedProcess(command, process.returncode, *printed)
                unsent = None
                stopped.look()
            last_words.tell(_PROCESS, "killed, as it was stopped (SIGSTOP)", "")
            return None
        finally:
            process.kill()


def _behind(line: str) -> str:
    return f": {line[:_SHOWN_CHARACTERS]}" if line else ""


def _late(seconds: float) -> str:
    return f"a trial load did not end in {seconds:g} seconds (trial_seconds)"


def _starved(had: OwnTime, seconds: float) -> str:
    return (
        f"a trial load did not end in {CLOCK_TIMES * seconds:g} seconds of wall time, with a CPU "
        f"for only {had.seconds:.0f} of them (trial_seconds)"
    )


def main(directory: Path, job: Mapping[str, Any], seconds: float, memory_bytes: int) -> int:
    """Load a version directory on the CPU for one row; print the error if that fails.

    Returns the exit status of the process.
    """
    from xlaserve.runtime.devices import jax_runtime

    try:
        device = jax_runtime.start("cpu")
        confine(memory_bytes, file_bytes=FILE_BYTES, open_files=OPEN_FILES)
        # Allow every core to be busy for the whole time.
        limit_processor(seconds * (os.cpu_count() or 1))
        if job["onnx"]:
            with TemporaryDirectory(directory.parent) as temporary:
                made = _converted(job["onnx"], temporary.path / "model", device)
                _load(made, job["parameters"], device)
        else:
            _load(directory, job["parameters"], device)
    except (OutOfMemory, MemoryError):
        print(_too_much(memory_bytes))  # noqa: T201, the parent reads it
        return _REFUSED
    except XlaserveError as error:
        print(error)  # noqa: T201, likewise
        return _REFUSED
    return 0


def _too_much(memory_bytes: int) -> str:
    return (
        f"a trial load took more than {memory_bytes} bytes of memory beyond its initial size"
        " (compile_process_bytes)"
    )


def _converted(source: Mapping[str, Any], target: Path, device: str) -> Path:
    from xlaserve.runtime.load_context import LoadContext

    # Imported by name, because the importers are in a higher layer.
    known = OnnxSource(**{**source, "path": Path(source["path"])})
    package = "pt2" if known.is_pt2 else "onnx"
    loading = importlib.import_module(f"xlaserve.importers.{package}.loading")
    loading.converted(known, target, LoadContext("trial", "1", ModelConfig(), device))
    return target


def _load(directory: Path, parameters: Mapping[str, str], device: str) -> None:
    from xlaserve.runtime import loaders
    from xlaserve.runtime.load_context import LoadContext
    from xlaserve.runtime.programs.compilation import Compilation

    batch = 0
    if plain_artifact.find(directory) is None:
        batch = 1 if manifest.read(directory).max_batch_size else 0
    own_parameters = {name: text for name, text in parameters.items() if name not in _OF_A_SERVER}
    config = ModelConfig(max_batch_size=batch, parameters=own_parameters)
    # Without the server's limits: the server applies these itself.
    compilation = Compilation(tries_here=True)
    context = LoadContext(
        "trial",
        "1",
        config,
        device,
        max_on_demand_shapes=sys.maxsize,
        compilation=compilation,
    )
    loaders.load(directory, context).close()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[5]))
    # SIGALRM's default action ends the process even while XLA holds the GIL.
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
    limits = float(sys.argv[3]), int(sys.argv[4])
    sys.exit(main(Path(sys.argv[1]), json.load(sys.stdin), *limits))
