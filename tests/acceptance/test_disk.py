"""D3: loads with files on a full or read-only disk are refused, and everything else works."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import several
from support.doubling import export_double
from support.server import serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

DISK_BYTES = 1 << 20
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "double")
Load: Any = pb.RepositoryModelLoadRequest  # pyright: ignore[reportAttributeAccessIssue]
Infer: Any = pb.ModelInferRequest  # pyright: ignore[reportAttributeAccessIssue]


def mount(path: Path, options: str) -> subprocess.CompletedProcess[bytes]:
    arguments = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    return subprocess.run(arguments, capture_output=True, check=False)


def remount(path: Path, how: str) -> None:
    arguments = ["mount", "-o", f"remount,{how}", str(path)]
    subprocess.run(arguments, capture_output=True, check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if mount(path, f"size={DISK_BYTES}").returncode:
        pytest.skip("nothing may be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


async def loading(stub: Any, size: int) -> tuple[str, str]:
    """Load the model with other files; return status and message."""
    request = Load(model_name="double")
    request.parameters["config"].string_param = json.dumps({"max_batch_size": 4})
    request.parameters["file:1/model.json"].bytes_param = bytes(size)
    try:
        await stub.RepositoryModelLoad(request)
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def double(stub: Any) -> list[int]:
    request = Infer(model_name="double", raw_input_contents=[bytes(8)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    return list((await stub.ModelInfer(request)).raw_output_contents[0])


def assert_refused(disk: Path, kind: str, code: str, text: str) -> None:
    """Check the error of a load whose files this kind of disk rejects."""
    # RESOURCE_EXHAUSTED on a read-only disk would make a mesh unload other models in vain.
    expected = {"full": "RESOURCE_EXHAUSTED", "read-only": "FAILED_PRECONDITION"}
    assert expected[kind] == code
    assert "double" in text
    assert str(disk) not in text


@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_files_that_cannot_be_written_are_refused_and_the_model_serves_on(
    tmp_path: Path, disk: Path, kind: str
) -> None:
    export_double(tmp_path / "models")
    async with serving(disk, tmp_path / "models", load_model=("double",)) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            if kind == "read-only":
                remount(disk, "ro")
            code, text = await loading(stub, 2 * DISK_BYTES)
            answer = await double(stub)
            left = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 64]
            if kind == "read-only":
                remount(disk, "rw")
            # The failed load leaves nothing that blocks the next one.
            later, _ = await loading(stub, 100)
            again = await double(stub)

    assert_refused(disk, kind, code, text)
    assert [] == left
    assert [0] * 8 == answer == again
    assert "FAILED_PRECONDITION" == later  # this file was written, and is not a manifest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "read-only"])
async def test_files_that_cannot_be_written_for_other_processes_are_refused(
    tmp_path: Path, disk: Path, kind: str
) -> None:
    """The worker that gets the request writes the files for the others, and cleans up."""
    models = several.repository(tmp_path / "models")
    export_double(models)
    scratch = ("--scratch-directory", str(disk))
    async with several.several(models, *scratch, *EXPLICIT) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            if kind == "read-only":
                remount(disk, "ro")
            code, text = await loading(stub, 2 * DISK_BYTES)
            answer = await double(stub)
            left = [path for path in disk.rglob("*") if path.is_file()]
            if kind == "read-only":
                remount(disk, "rw")

    assert_refused(disk, kind, code, text)
    assert [] == left
    assert [0] * 8 == answer
