"""A server starts despite a broken repository: the rest is served, and all errors are reported."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from support import identity_models, python_models, several
from support.process import served

ALL = ("--model-control-mode", "explicit", "--load-model", "*", "--allow-python-models")


class Broken(NamedTuple):
    """A model that fails to load."""

    make: Callable[[Path], object]
    """Damages the directory of an identity model."""
    reason: str
    """Part of the reason in the log and the index."""


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    make(path)


BROKEN: Mapping[str, Broken] = {
    "no-json": Broken(lambda at: (at / "config.json").write_text("{"), "config.json: line 1"),
    "config-folder": Broken(
        lambda at: _replace(at / "config.json", Path.mkdir), "config.json is not a regular file"
    ),
    "config-loop": Broken(
        lambda at: _replace(at / "config.json", lambda file: file.symlink_to(file.name)),
        "'config.json' is outside the model repository",
    ),
    "unknown-backend": Broken(
        lambda at: (at / "config.json").write_text('{"backend": "cobol"}'), "cobol"
    ),
    "no-version": Broken(
        lambda at: (at / "1").rmdir(),
        "it has no version directory: put its files into no-version/1/",
    ),
    "empty-version": Broken(lambda at: (at / "config.json").unlink(), "the directory '1' is empty"),
    "version-loop": Broken(
        lambda at: _replace(at / "1", lambda link: link.symlink_to("1")), "is a dangling link"
    ),
    "version-away": Broken(
        lambda at: _replace(at / "1", lambda link: link.symlink_to("/")),
        "is outside the model repository and every model_root (--model-root), or a link that"
        " leads outside",
    ),
    "no-python": Broken(lambda at: _python(at, "this is no Python"), "invalid syntax"),
    "raises": Broken(lambda at: _python(at, "raise OSError('no disk')"), "no disk"),
}


def _python(at: Path, text: str) -> None:
    shutil.rmtree(at)
    python_models.write_function(at.parent, at.name, "return {}", several.CONFIG)
    (at / "1" / "model.py").write_text(text)


SKIPPED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "caf\udce9": (lambda at: at.mkdir(), "it is not UTF-8, rename it"),
    "a\nb": (lambda at: at.mkdir(), "it contains a control character"),
    "loop": (lambda at: at.symlink_to(at.name), "Too many levels of symbolic links"),
    "nothing": (lambda at: at.symlink_to("nowhere"), "it is a dangling link"),
    "file": (lambda at: at.write_text(""), "it is a file, expected a directory"),
    "pipe": (os.mkfifo, "it is a FIFO, expected a directory"),
}
"""Entries that are not models: how to create them, and the reason in the log."""


def write(root: Path) -> None:
    root.mkdir()
    for name in ("good", *BROKEN):
        identity_models.write(root, name, "FP32")
    for name, broken in BROKEN.items():
        broken.make(root / name)
    for name, (make, _) in SKIPPED.items():
        make(root / name)
    # The model's code deletes its own directory during the load.
    python_models.write_function(root, "leaving", "return {'y': x}", several.CONFIG)
    code = root / "leaving" / "1" / "model.py"
    going = f"import shutil\nshutil.rmtree({str(root / 'leaving')!r}, ignore_errors=True)\n"
    code.write_text(going + code.read_text())


@pytest.mark.parametrize("processes", [1, 2])
async def test_all_that_is_wrong_is_named_and_the_rest_serves(
    tmp_path: Path, processes: int
) -> None:
    write(tmp_path / "models")
    async with served(tmp_path / "models", *ALL, "--processes", str(processes)) as server:
        if processes > 1:
            await server.until(several.READY)
        async with aiohttp.ClientSession(f"http://{server.http}") as session:
            async with session.get("/v2/health/ready") as answer:
                assert 200 == answer.status
            async with session.post("/v2/repository/index", json={}) as answer:
                index = {row["name"]: row for row in await answer.json()}
        assert 0 == await server.stop()

    assert "READY" == index["good"]["state"]
    told: dict[str, set[str]] = {}
    to_do = "fix its files, then load it with the repository API, or restart the server"
    for record in server.log:
        if record["event"] == "model not loaded from the repository":
            assert to_do == record["to_do"]
            told.setdefault(record["model"], set()).add(record["error"])
    assert BROKEN.keys() <= told.keys() <= BROKEN.keys() | {"leaving"}
    for name, broken in BROKEN.items():
        assert all(broken.reason in text for text in told[name]), told[name]
        assert "UNAVAILABLE" == index[name]["state"]
        assert broken.reason in index[name]["reason"], index[name]
    skipped = {
        record["entry"]: record
        for record in server.log
        if record["event"] == "repository entry skipped"
    }
    assert SKIPPED.keys() == skipped.keys()
    for name, (_, reason) in SKIPPED.items():
        assert reason in skipped[name]["reason"]
        assert skipped[name]["to_do"].startswith(
            "make it a model directory, or give it a name that starts with a dot"
        )
    assert index.keys() <= {"good", "leaving", *BROKEN}
