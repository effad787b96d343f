"""S1 of the acceptance table: no file outside of the repository is ever opened.

The kernel reports every open (inotify), whether from Python or a C library. Files that cannot be
watched are covered by Python's audit hook.
"""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.doubling import export_double
from support.inotify import opened
from support.server import serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.python_models.code import FILE_NAME as PYTHON_FILE

DEVICES = ("/dev/zero", "/proc/self/environ")
"""Files that must not be opened either, but cannot be watched."""


def _files(version: Path) -> list[str]:
    return sorted(path.name for path in version.iterdir())


def hostile(models: Path, outside: Path) -> list[str]:
    """Write models with links out of the repository for every kind of file; return their names."""
    whole = outside / "double"

    def copied(name: str) -> Path:
        shutil.copytree(whole, models / name)
        return models / name

    def linked(name: str, inside: str, target: str | Path) -> None:
        path = copied(name) / inside
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    (models / "a-link").symlink_to(whole)
    (models / "a-link-to-a-link").symlink_to(outside / "link")
    linked("version", "1", whole / "1")
    linked("version-relative", "1", "../../outside/double/1")
    linked("another-version", "2", outside)
    for name in ("config.json", "config.pbtxt"):
        linked(f"own-{name}", name, outside / name)
    for name in _files(whole / "1"):
        linked(f"file-{name}", f"1/{name}", whole / "1" / name)
        for number, device in enumerate(DEVICES):
            linked(f"device-{number}-{name}", f"1/{name}", device)
        fifo = copied(f"fifo-{name}") / "1" / name
        fifo.unlink()
        os.mkfifo(fifo)
    for name in ("model.onnx", PYTHON_FILE, "model.graphdef"):
        (models / f"only-{name}" / "1").mkdir(parents=True)
        (models / f"only-{name}" / "1" / name).symlink_to(outside / name)
    return sorted(path.name for path in models.iterdir() if path.name != "double")


def names(outside: Path) -> list[str]:
    """Return names and paths that would lead to an intact model if followed."""
    whole = str(outside / "double")
    up = ["../" * depth + whole.lstrip("/") for depth in range(1, 12)]
    return [
        whole,
        f"/{whole}",
        f"file://{whole}",
        "../outside/double",
        "double/../../outside/double",
        "..%2foutside%2fdouble",
        "%2e%2e%2foutside%2fdouble",
        "..\\outside\\double",
        "\uff0e\uff0e/outside/double",
        "../outside/double\0",
        "./../outside/double",
        *up,
    ]


@pytest.fixture
def audited() -> Any:
    """Yield the devices that Python opens; the audit hook stays installed, but inactive."""
    found: list[str] = []
    listens = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if listens and event == "open" and str(arguments[0]) in DEVICES:
            found.append(str(arguments[0]))

    sys.addaudithook(hook)
    yield found
    listens.clear()


@pytest.mark.slow
async def test_nothing_outside_of_the_repository_is_opened(
    tmp_path: Path, audited: list[str]
) -> None:
    """Neither through links nor names; opening files inside is detected."""
    models, outside = tmp_path / "models", tmp_path / "outside"
    export_double(models)
    export_double(outside)
    (outside / "link").symlink_to("double")
    for name in ("config.json", "config.pbtxt", "model.onnx", PYTHON_FILE, "model.graphdef"):
        (outside / name).write_text("{}")
    asked = hostile(models, outside) + names(outside)
    given = {"allow_python_models": True, "http_endpoint": "port:0"}
    async with serving(tmp_path, models, **given) as server:
        with opened(outside) as leaked, opened(models) as inside:
            async with grpc.aio.insecure_channel(server.url) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                loaded = [name for name in asked if await _load(stub, name)]
                await stub.RepositoryIndex(pb.RepositoryIndexRequest())
                assert await _load(stub, "double")
            read, out = inside.since(), leaked.since()

    assert str(models / "double" / "1") in {str(Path(path).parent) for path in read}
    assert [] == out
    assert [] == audited
    # A broken version that nobody requested does not matter.
    assert {"another-version"} >= set(loaded)


async def _load(stub: Any, name: str) -> bool:
    try:
        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=name), timeout=60)
    except grpc.aio.AioRpcError as error:
        assert grpc.StatusCode.DEADLINE_EXCEEDED is not error.code(), name
        return False
    return True


OPENERS: dict[str, Callable[[Path], Any]] = {
    "Python": lambda path: path.read_bytes(),
    "the system": lambda path: os.close(os.open(path, os.O_RDONLY)),
    "a directory": lambda path: list(path.parent.iterdir()),
}


@pytest.mark.parametrize("how", OPENERS)
def test_the_watch_sees_what_is_opened(tmp_path: Path, how: str) -> None:
    (tmp_path / "below").mkdir()
    file = tmp_path / "below" / "file"
    file.write_bytes(b"x")
    with opened(tmp_path) as seen:
        assert [] == seen.since()
        OPENERS[how](file)

        assert seen.since()


@pytest.mark.parametrize("device", DEVICES)
def test_the_hook_sees_devices(audited: list[str], device: str) -> None:
    with Path(device).open("rb") as file:
        file.read(1)

    assert [device] == audited
