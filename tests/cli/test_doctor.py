"""`xlaserve doctor` distinguishes problems that stop a server from those that do not."""

import socket
from pathlib import Path

import pytest

from xlaserve.cli import doctor
from xlaserve.cli.doctor import Result
from xlaserve.settings import Settings


def results(**settings: object) -> dict[str, tuple[Result, str]]:
    """Return the results of all checks by name, searching only for CPU devices."""
    free = {"grpc_endpoint": "port:0", "http_endpoint": "port:0", "device": "cpu"}
    read = Settings.read({}, repository=".", **free | settings)
    return {check.name: (check.result, check.text) for check in doctor.checked(read)}


def test_a_machine_that_serves_is_told_so(tmp_path: Path) -> None:
    found = results(compilation_cache_directory=str(tmp_path / "not" / "yet"))

    assert Result.FAILED not in {result for result, _ in found.values()}
    assert {"python", "jax", "devices", "compile", "open files", "grpc_endpoint"} <= found.keys()
    assert Result.OK == found["compilation cache"][0]
    assert " of cpu" in found["devices"][1]


def test_a_port_in_use_stops_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result, text = results(http_endpoint=f"port:{port}")["http_endpoint"]

    assert (Result.FAILED, f"127.0.0.1 port {port}: Address already in use") == (result, text)


def test_a_directory_that_is_none_stops_a_server(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    found = results(
        scratch_directory=file / "scratch",
        compilation_cache_directory=str(file / "cache"),
        grpc_endpoint=f"unix:{file}/socket",
    )

    for name in ("scratch directory", "compilation cache", "grpc_endpoint"):
        assert Result.FAILED == found[name][0]


def test_a_device_that_is_not_there_stops_a_server() -> None:
    assert Result.FAILED == results(device="tpu")["devices"][0]


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "wanted_files", lambda _: 1 << 40)

    result, text = results()["open files"]

    assert Result.WARNING == result
    assert text.endswith("or lower max_connections")
