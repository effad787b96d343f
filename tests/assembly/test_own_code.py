"""A process that keeps its code, and one that it starts: see `process/own_code.py`."""

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from structlog.testing import capture_logs

from xlaserve import build
from xlaserve.artifact import onnx_source
from xlaserve.process import own_code

KEEPING = """
    import json, os, sys
    from xlaserve.process import own_code
    from xlaserve.process.children import start_shielded
    own_code.keep()
    descriptor = own_code.kept()
    own_code.keep()
    assert descriptor == own_code.kept()
    from xlaserve.artifact import onnx_source
    try:
        os.write(descriptor, b"x")
    except OSError as error:
        refused = error.strerror
    version = [sys.executable, "-P", "-m", "xlaserve.cli", "--version"]
    child = start_shielded(version, stdout=-1, text=True)
    foreign = [sys.executable, "-m", "json.tool"]
    print(json.dumps({
        "archive": f"/proc/self/fd/{descriptor}",
        "late": onnx_source.__file__,
        "converter": onnx_source._converter(),
        "refused": refused,
        "version": child.communicate()[0],
        "command": own_code.command(version),
        "foreign": own_code.command(foreign) == (foreign, []),
    }))
"""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """Return the output of a process that has kept its code."""
    given = [sys.executable, "-c", textwrap.dedent(KEEPING)]
    run = subprocess.run(given, stdout=subprocess.PIPE, check=True, timeout=60)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_a_module_imported_late_is_the_kept_one(told: dict[str, Any]) -> None:
    folder = f"{told['archive']}/xlaserve/artifact/onnx_source.py"

    assert told["late"] in {folder, f"{folder}c"}


def test_kept_code_names_conversions_as_code_on_disk_does(told: dict[str, Any]) -> None:
    assert list(onnx_source._converter()) == told["converter"]


def test_kept_code_knows_its_version(told: dict[str, Any]) -> None:
    assert f"xlaserve {build.version()}\n" == told["version"]


def test_nobody_can_change_kept_code(told: dict[str, Any]) -> None:
    assert "Operation not permitted" == told["refused"]


def test_only_modules_of_the_package_run_from_the_archive(told: dict[str, Any]) -> None:
    descriptor = int(told["archive"].rpartition("/")[2])
    words = [sys.executable, "-P", told["archive"], "xlaserve.cli", "--version"]

    assert [words, [descriptor]] == told["command"]
    assert told["foreign"]


def test_a_process_that_keeps_nothing_starts_others_from_disk() -> None:
    given = (sys.executable, "-m", "xlaserve.cli")

    assert (list(given), []) == own_code.command(given)


def test_a_server_that_cannot_keep_its_code_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError("Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with capture_logs() as log:
        own_code.keep()

    assert own_code.kept() is None
    assert ["Too many open files"] == [record["reason"] for record in log]


def test_a_module_that_is_missing_is_not_left_out_of_a_hash() -> None:
    with pytest.raises(FileNotFoundError, match="artifact/missing"):
        own_code.sources(["artifact/missing.py"])
