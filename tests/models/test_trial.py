"""Files from clients are tried in a process that they may crash."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from support.lasting import without_stablehlo

from xlaserve.artifact import manifest
from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel, LoadCancelled
from xlaserve.process import own_time
from xlaserve.process.own_time import Seen
from xlaserve.runtime import trial
from xlaserve.runtime.trial import CLOCK_TIMES, try_loading

SECONDS = 120


@pytest.fixture
def sent(example_models: Path, tmp_path: Path) -> Path:
    """A version directory, as in an override."""
    return shutil.copytree(example_models / "identity" / "1", tmp_path / "1")


def damage(directory: Path, name: str, data: bytes) -> None:
    """Replace a file, with a matching checksum in the manifest."""
    (directory / name).write_bytes(data)
    described = json.loads((directory / manifest.FILE_NAME).read_text())
    described["files"][name] = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    (directory / manifest.FILE_NAME).write_text(json.dumps(described))


def test_a_good_model_passes(sent: Path) -> None:
    try_loading(sent, SECONDS)


def test_stablehlo_that_cannot_be_read_is_refused_with_the_reason(sent: Path) -> None:
    damage(sent, manifest.STABLEHLO, (sent / manifest.STABLEHLO).read_bytes()[:-100])
    with pytest.raises(
        InvalidModel,
        match=r"model\.stablehlo .*cannot be read by the installed jax ",
    ):
        try_loading(sent, SECONDS)


def test_artifact_that_cannot_be_read_is_refused_with_the_reason(sent: Path) -> None:
    damage(
        without_stablehlo(sent), manifest.ARTIFACT, (sent / manifest.ARTIFACT).read_bytes()[:-100]
    )
    with pytest.raises(
        InvalidModel,
        match=r"model\.jaxexp .*cannot be read by the installed jax ",
    ):
        try_loading(sent, SECONDS)


@pytest.mark.slow
def test_it_is_loaded_with_the_parameters_of_its_configuration(tmp_path: Path) -> None:
    """Device and batch parameters are ignored: a trial has one device and one row."""
    directory = export_model(
        lambda params, x: {"y": x + x}, None, {"x": ("FP32", [-1, "s"])}, tmp_path / "m" / "1"
    )
    parameters = {"compiled_shapes": "3", "devices": "0,1", "batch_sizes": "8"}

    try_loading(directory, SECONDS, parameters)
    with pytest.raises(InvalidModel, match="dimensions other than a leading batch need sizes"):
        try_loading(directory, SECONDS)
    with pytest.raises(InvalidModel, match="'compiled_shapes': expected sizes for each of s"):
        try_loading(directory, SECONDS, {"compiled_shapes": "none"})


def test_a_directory_without_an_artifact_is_not_tried(tmp_path: Path) -> None:
    try_loading(tmp_path, SECONDS, command=("/no/such/program",))


@pytest.mark.parametrize(
    ("code", "seconds", "text"),
    [
        ("import os; os.kill(os.getpid(), 11)", SECONDS, r"crashed the process.*\(SIGSEGV\)"),
        ("import time; time.sleep(100)", 0.1, r"did not end in 0.1 seconds \(trial_seconds\)"),
        ("raise SystemExit(7)", SECONDS, "exit status 7"),
    ],
)
def test_a_process_that_dies_or_hangs_is_the_models_fault(
    sent: Path, code: str, seconds: float, text: str
) -> None:
    with pytest.raises(InvalidModel, match=text):
        try_loading(sent, seconds, command=(sys.executable, "-c", code))


class Busy:
    """A machine on which a trial waits for a CPU, and ends after a number of samples."""

    def __init__(self, ends: Path, looks: int) -> None:
        self._ends = ends
        self._left = looks

    def __call__(self, pid: int) -> Seen:
        self._left -= 1
        if not self._left:
            self._ends.touch()
        return Seen(0.0, True)


UNTIL_THERE = """
import pathlib, sys, time
while not pathlib.Path({path!r}).exists():
    time.sleep(0.01)
"""


def test_a_trial_that_waits_for_a_processor_takes_none_of_its_time(
    sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, models must not be refused."""
    ends = tmp_path / "ends"
    monkeypatch.setattr(own_time, "seen", Busy(ends, 6))
    monkeypatch.setattr(trial, "CLOCK_TIMES", 10_000)
    command = (sys.executable, "-c", UNTIL_THERE.format(path=str(ends)))

    try_loading(sent, 0.15, command=command)

    assert ends.exists()


def test_a_trial_that_waits_for_ever_is_told_of_the_clock(
    sent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_time, "seen", lambda pid: Seen(0.0, True))
    text = f"in {CLOCK_TIMES * 0.05:g} seconds of wall time, with a CPU for only"

    with pytest.raises(InvalidModel, match=text):
        try_loading(sent, 0.05, command=(sys.executable, "-c", "import time; time.sleep(600)"))


def test_a_trial_ends_with_its_load(sent: Path, tmp_path: Path) -> None:
    began = tmp_path / "began"
    code = "import os, pathlib, sys, time\n"
    code += f"pathlib.Path({str(began)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"

    def check_cancelled() -> None:
        if began.exists() and began.read_text():
            raise LoadCancelled("m")

    with pytest.raises(LoadCancelled):
        try_loading(
            sent, SECONDS, command=(sys.executable, "-c", code), check_cancelled=check_cancelled
        )

    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)


def test_what_a_load_needs_behind_it_begins_before_it_ends(sent: Path, tmp_path: Path) -> None:
    """Both import JAX: one after the other, they would double the load time on a busy machine."""
    begun = tmp_path / "begun"
    waits = (
        "import pathlib, time\n"
        f"while not pathlib.Path({str(begun)!r}).exists():\n"
        "    time.sleep(0.01)\n"
    )

    try_loading(sent, SECONDS, command=(sys.executable, "-c", waits), begin=begun.touch)

    assert begun.exists()


@pytest.mark.parametrize("cut", [0, 200])
def test_plain_file_of_any_name_is_tried(tmp_path: Path, cut: int) -> None:
    """A client's file is first read in another process, with or without a manifest."""
    x = jax.ShapeDtypeStruct((3,), np.float32)
    data = jax.export.export(jax.jit(lambda x: x * 2))(x).serialize()
    (tmp_path / "sent.jaxexp").write_bytes(data[: len(data) - cut])

    if not cut:
        try_loading(tmp_path, SECONDS)
        return
    with pytest.raises(InvalidModel, match=r"^sent\.jaxexp cannot be read by the installed jax "):
        try_loading(tmp_path, SECONDS)


def test_memory_of_a_trial_load_is_limited(tmp_path: Path) -> None:
    """A program of a few lines may request any amount of memory."""

    def large(params: object, x: jax.Array) -> dict[str, jax.Array]:
        return {"y": x[:, None] + jnp.zeros((1, 1 << 28), jnp.float32)}

    directory = export_model(large, None, {"x": ("FP32", [1])}, tmp_path / "m" / "1")
    with pytest.raises(InvalidModel, match=f"took more than {1 << 28} bytes of memory"):
        try_loading(directory, SECONDS, memory_bytes=1 << 28)


def test_dimension_that_a_client_wrote_is_refused_and_not_evaluated(sent: Path) -> None:
    described = json.loads((sent / manifest.FILE_NAME).read_text())
    described["durable"]["arguments"][0] = "float32[s^200000000]"
    (sent / manifest.FILE_NAME).write_text(json.dumps(described))

    with pytest.raises(InvalidModel, match=r"dimension 's\^200000000': it may expand to more than"):
        try_loading(sent, SECONDS)
