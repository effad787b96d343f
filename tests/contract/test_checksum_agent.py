"""The `checksum` agent of a model repository, as Triton's is configured."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc.aio as triton
from support.server import Serve
from tritonclient.utils import InferenceServerException

TENSOR = {"data_type": "TYPE_FP32", "dims": [1]}


def put(root: Path, **parameters: str) -> Path:
    """Write a model with an agent; returns its directory."""
    config = {
        "backend": "identity",
        "input": [{"name": "x", **TENSOR}],
        "output": [{"name": "y", **TENSOR}],
        "model_repository_agents": {"agents": [{"name": "checksum", "parameters": parameters}]},
    }
    model = root / "m"
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    (model / "table.bin").write_bytes(b"a table")
    (model / "1/weights.bin").write_bytes(b"weights")
    return model


GOOD = {
    "MD5:table.bin": hashlib.md5(b"a table").hexdigest(),
    "md5:1/weights.bin": hashlib.md5(b"weights").hexdigest(),
}


@pytest.fixture
async def empty(serve: Serve, tmp_path: Path) -> AsyncIterator[tuple[Path, Any]]:
    """The repository of a server, and its client."""
    root = tmp_path / "models"
    root.mkdir()
    async with serve(root) as server, triton.InferenceServerClient(server.url) as client:
        yield root, client


async def refusal(client: Any, **more: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        await client.load_model("m", **more)
    return str(caught.value.message())


async def test_files_that_are_the_ones_are_served(empty: tuple[Path, Any]) -> None:
    root, client = empty
    put(root, **GOOD)
    await client.load_model("m")

    assert await client.is_model_ready("m")


async def test_another_file_fails_the_load_and_what_served_goes_on(
    empty: tuple[Path, Any],
) -> None:
    root, client = empty
    model = put(root, **GOOD)
    await client.load_model("m")
    (model / "1/weights.bin").write_bytes(b"others")
    text = await refusal(client)
    expected, got = (hashlib.md5(data).hexdigest() for data in (b"weights", b"others"))

    assert "failed to load 'm', '1/weights.bin' does not match its checksum" in text
    assert f"expected MD5 {expected}, got {got}" in text
    assert await client.is_model_ready("m")


async def test_a_file_must_be_there_and_inside(empty: tuple[Path, Any], tmp_path: Path) -> None:
    root, client = empty
    (tmp_path / "secret").write_bytes(b"")
    problems = {
        "MD5:nothing.bin": "nothing.bin is missing",
        "MD5:/etc/hostname": "is outside the model repository and every model_root"
        " (--model-root), or a link that leads outside",
        "MD5:../../secret": "is outside the model repository and every model_root (--model-root),"
        " or a link that leads outside",
        "MD5:1": "1 is not a regular file",
        "SHA256:table.bin": 'expected MD5:<file>, got "SHA256:table.bin"',
        "table.bin": 'expected MD5:<file>, got "table.bin"',
        "MD5:": 'expected MD5:<file>, got "MD5:"',
    }
    for key, problem in problems.items():
        put(root, **{key: "0"})

        assert problem in await refusal(client)


async def test_what_a_client_sends_is_verified_too(empty: tuple[Path, Any]) -> None:
    root, client = empty
    config = (
        put(root, **{"MD5:1/new.bin": hashlib.md5(b"new").hexdigest()}) / "config.json"
    ).read_text()
    both = {"file:1/new.bin": b"new", "file:2/more.bin": b""}
    await client.load_model("m", config=config, files=both)

    assert await client.is_model_ready("m")
    text = await refusal(client, config=config, files={"file:1/new.bin": b"old"})
    assert "'1/new.bin' does not match its checksum" in text


async def test_an_ensemble_has_files_as_well(empty: tuple[Path, Any]) -> None:
    root, client = empty
    put(root)
    agents = {"agents": [{"name": "checksum", "parameters": {"MD5:labels.txt": "0" * 32}}]}
    maps = {"input_map": {"x": "x"}, "output_map": {"y": "y"}}
    ensemble = {
        "platform": "ensemble",
        "input": [{"name": "x", **TENSOR}],
        "output": [{"name": "y", **TENSOR}],
        "ensemble_scheduling": {"step": [{"model_name": "m", **maps}]},
        "model_repository_agents": agents,
    }
    (root / "e").mkdir()
    (root / "e/config.json").write_text(json.dumps(ensemble))
    (root / "e/labels.txt").write_text("a")
    with pytest.raises(InferenceServerException, match="'labels.txt' does not match"):
        await client.load_model("e")
