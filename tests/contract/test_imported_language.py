"""An imported Hugging Face checkpoint generates the same text as transformers."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import json
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support.checkpoints import DATA, write_tensors
from support.server import Serve
from typer.testing import CliRunner, Result

import huggingface_references as references
from xlaserve.cli import application
from xlaserve.errors import InvalidModel, InvalidRequest
from xlaserve.importers.huggingface import checkpoint, configuration, forward, quantising

WRITTEN = "models/story/1/params.safetensors"
CONFIG = "\n".join(
    f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
    for name, value in {"slots": 2, "length": 48, "windows": 48, "chunk": 8}.items()
)


def checkpoint_of(name: str, directory: Path) -> Path:
    """Write a checkpoint with its config.json and tokenizer file."""
    directory.mkdir()
    write_tensors(directory, name)
    shutil.copy(DATA / name / "config.json", directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def imported(*arguments: object) -> Result:
    result = CliRunner().invoke(application(), ["import", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in references.CASES
            if name != "llama"
        ),
    ],
)
async def test_an_imported_checkpoint_continues_as_transformers_does(
    serve: Serve, tmp_path: Path, name: str
) -> None:
    source = checkpoint_of(name, tmp_path / "source")
    with np.load(DATA / name / "references.npz") as found:
        tokens: list[int] = found["tokens"].tolist()
    repository = tmp_path / "models"

    said = imported(source, repository / "story").output
    (repository / "story/config.pbtxt").write_text(CONFIG)
    async with serve(repository, load_model=("story",)) as server:
        async with triton.InferenceServerClient(server.url) as client:
            got = await _continued(client, tokens[: -references.CONTINUED])

    described = json.loads((repository / "story/1/generator.json").read_text())
    stop = json.loads((source / "config.json").read_text())["eos_token_id"]
    assert [stop] == described["stop_tokens"]
    assert "also copied: tokenizer.json" in said
    assert (repository / "story/1/tokenizer.json").is_file()
    assert tokens[-references.CONTINUED :] == got


async def _continued(client: Any, prompt: list[int]) -> list[int]:
    tensor = triton.InferInput("tokens", [len(prompt)], "INT32")
    tensor.set_data_from_numpy(np.array(prompt, np.int32))
    parameters = {"max_tokens": references.CONTINUED, "ignore_eos": True}

    async def sent() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "story", "inputs": [tensor], "parameters": parameters}

    found: list[int] = []
    async for result, error in client.stream_infer(sent()):
        if error is not None:
            raise error
        found.append(int(result.as_numpy("token")[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.3), ("int4", 0.25)])
async def test_quantised_weights_are_served(
    serve: Serve, tmp_path: Path, kind: str, most: float
) -> None:
    """The tokens follow from the quantized parameters, whose file has a given fraction of the
    size.
    """
    source, repository = checkpoint_of("gpt2", tmp_path / "source"), tmp_path / "models"
    said = imported(source, repository / "story", "--weights", kind).output
    (repository / "story/config.pbtxt").write_text(CONFIG)
    form = configuration.read(source)
    params = quantising.quantised(checkpoint.read(source, form), kind)
    prompt = [5, 17, 99, 31]
    async with serve(repository, load_model=("story",)) as server:
        async with triton.InferenceServerClient(server.url) as client:
            got = await _continued(client, prompt)
    logits = jax.jit(partial(forward.all_logits, form))(params, np.array([*prompt, *got], np.int32))

    assert np.asarray(logits).argmax(-1)[len(prompt) - 1 : -1].tolist() == got
    assert f"{kind}: " in said
    assert "the likeliest token is the same after" in said
    sizes = [(tmp_path / name).stat().st_size for name in (WRITTEN, "source/model.safetensors")]
    # Positions, norms and biases are not quantized, and are a large part of such a small model.
    assert sizes[0] - 4 * 128 * 64 < (most + 0.05) * (sizes[1] - 4 * 128 * 64)


def test_kinds_of_weights_are_refused_by_name(tmp_path: Path) -> None:
    source = checkpoint_of("llama", tmp_path / "source")
    (tmp_path / "model.onnx").write_bytes(b"")

    with pytest.raises(InvalidRequest, match="--weights: expected one of int8, int4, got 'int3'"):
        imported(source, tmp_path / "models/story", "--weights", "int3")
    with pytest.raises(InvalidRequest, match="--weights is for language models"):
        imported(tmp_path / "model.onnx", tmp_path / "models/story", "--weights", "int8")


def test_a_flag_of_onnx_is_refused(tmp_path: Path) -> None:
    source = checkpoint_of("llama", tmp_path / "source")

    with pytest.raises(InvalidRequest, match="--dim is for ONNX files"):
        imported(source, tmp_path / "models/story", "--dim", "a=1")
    with pytest.raises(InvalidRequest, match="a directory with config.json"):
        imported(tmp_path, tmp_path / "models/story")
    assert not (tmp_path / "models").exists()


def test_a_version_is_not_overwritten(tmp_path: Path) -> None:
    there = tmp_path / "models/story/3"
    there.mkdir(parents=True)
    source = checkpoint_of("llama", tmp_path / "source")

    with pytest.raises(InvalidModel, match="3 already exists.*--version takes another number"):
        imported(source, tmp_path / "models/story", "--version", "3")
    assert [] == list(there.iterdir())
