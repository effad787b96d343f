"""A configuration sent by a client may only name files of its own model."""

import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from support import asking, identity_models
from support.asking import Client
from support.http import ask
from support.server import Serve
from tritonclient.utils import InferenceServerException

from xlaserve.files import files
from xlaserve.model_config.fields import FIELDS
from xlaserve.residence.repository import directory_reader
from xlaserve.serving.inputs.classification import MOST_CLASSES

SECRET = "the secret of b"
TENSOR = {"data_type": "TYPE_FP32", "dims": [1]}
OUTSIDE = ("../b/1/secret.txt", "1/../../b/1/secret.txt", "{root}/b/1/secret.txt", "1/link.txt")
"""Paths that leave the directory of model a; the last one is a symbolic link."""


def _config(**more: Any) -> dict[str, Any]:
    tensors = {"input": [{"name": "x", **TENSOR}], "output": [{"name": "y", **TENSOR}]}
    return {"backend": "identity", **tensors, **more}


def _state(file: str) -> Mapping[str, Any]:
    initial = {"name": "i", "data_file": file, **TENSOR}
    names = {"input_name": "s", "output_name": "t"}
    return {"sequence_batching": {"state": [{**names, **TENSOR, "initial_state": [initial]}]}}


def _warmup(file: str) -> Mapping[str, Any]:
    return {"model_warmup": [{"name": "w", "inputs": {"x": {"input_data_file": file, **TENSOR}}}]}


def _checksum(file: str) -> Mapping[str, Any]:
    agent = {"name": "checksum", "parameters": {f"MD5:{file}": "0" * 32}}
    return {"model_repository_agents": {"agents": [agent]}}


NAMING: Mapping[str, Any] = {
    "output.label_filename": lambda file: {
        "output": [{"name": "y", "label_filename": file, **TENSOR}]
    },
    "default_model_filename": lambda file: {"default_model_filename": file},
    "cc_model_filenames": lambda file: {"cc_model_filenames": {"9.0": file}},
    "model_repository_agents.agents.parameters": _checksum,
    "sequence_batching.state.initial_state.data_file": _state,
    "model_warmup.inputs.input_data_file": _warmup,
}
"""Configurations that name a file, by field."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two tenants' models: b has a secret file, and a's directory has a link to it."""
    root = tmp_path / "models"
    identity_models.write(root, "a", "FP32", (1,))
    identity_models.write(root, "b", "FP32", (1,))
    (root / "b" / "1" / "secret.txt").write_text(SECRET)
    (root / "a" / "1" / "link.txt").symlink_to(root / "b" / "1" / "secret.txt")
    (root / "a" / "1" / "labels.txt").write_text("one\ntwo")
    return root


@pytest.fixture
async def client(serve: Serve, root: Path) -> AsyncIterator[Client]:
    async with serve(root, http_endpoint="port:0") as server, asking.client(server) as running:
        yield running


def test_every_field_that_names_a_file_is_tried() -> None:
    assert set(NAMING) == {name for name, row in FIELDS.items() if row.files is not None}


def test_every_field_with_file_in_its_name_says_which_files() -> None:
    found = {name for name, row in FIELDS.items() if "file" in name.rpartition(".")[2]}
    obeyed = {name for name in found if FIELDS[name].effect.name == "OBEYED"}

    assert obeyed <= set(NAMING) | {"instance_group.profile"}


@pytest.mark.parametrize("field", NAMING)
@pytest.mark.parametrize("files", [{}, {"file:1/mine.txt": b"mine"}], ids=["alone", "with files"])
async def test_no_field_leads_out_of_the_model(
    client: Client, root: Path, field: str, files: Mapping[str, bytes]
) -> None:
    """The error must not reveal whether the file exists, either."""
    for outside in OUTSIDE[:3]:
        texts = []
        for name in ("secret.txt", "nothing.txt"):
            file = outside.format(root=root).replace("secret.txt", name)
            config = json.dumps(_config() | NAMING[field](file))
            text = await client.refused("a", config=config, files=dict(files) or None)
            texts.append(text.replace(name, "FILE"))

        assert texts[0] == texts[1]
        assert SECRET not in texts[0]
        assert "does not match its checksum (model_repository_agents): expected MD5" not in texts[0]


async def test_labels_that_a_link_leads_out_to_are_refused(client: Client) -> None:
    config = _config() | NAMING["output.label_filename"]("1/link.txt")
    text = await client.refused("a", config=json.dumps(config))

    assert "label_filename of output 'y': 'link.txt' is outside" in text


async def _labels(client: Client) -> str:
    assert client.server.http is not None
    answer = await ask(client.server.http, "GET", "/v2/models/a")
    found: str = json.loads(answer.body)["outputs"][0]["parameters"]["labels"]
    return found


async def test_labels_of_the_model_itself_are_read(client: Client) -> None:
    config = _config() | NAMING["output.label_filename"]("1/labels.txt")
    await client.grpc.load_model("a", config=json.dumps(config))

    assert '["one", "two"]' == await _labels(client)


async def test_the_configuration_of_a_repository_may_name_files_of_others(
    client: Client, root: Path
) -> None:
    """Only the operator can write it."""
    config = _config() | NAMING["output.label_filename"]("../b/1/secret.txt")
    (root / "a" / "config.json").write_text(json.dumps(config))
    await client.grpc.load_model("a")

    assert json.dumps([SECRET]) == await _labels(client)


SPARSE = 100 << 20


def _sparse(at: Path, size: int) -> None:
    with at.open("wb") as file:
        file.truncate(size)


def _socket(at: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(at.parent):
        made.bind(at.name)


LABELS: Mapping[str, tuple[Callable[[Path], object], str | list[str]]] = {
    "too large": (lambda at: _sparse(at, SPARSE), "more than the 16777216 allowed"),
    "a line of 15 MiB": (
        lambda at: at.write_bytes(b"a\n" + bytes(15 << 20)),
        "a label of at most 1024 bytes on each line, got 15728640 bytes on line 2",
    ),
    "more lines than may be": (
        lambda at: at.write_bytes(b"\n" * (1 << 18)),
        "at most 262144 lines in the label file (262144 per model), got 262145",
    ),
    "a FIFO": (os.mkfifo, "labels.txt is not a regular file"),
    "a device": (
        lambda at: at.symlink_to("/dev/zero"),
        "'labels.txt' is outside the model repository",
    ),
    "a directory": (Path.mkdir, "labels.txt is not a regular file"),
    "a socket": (_socket, "labels.txt cannot be read"),
    "a link to itself": (
        lambda at: at.symlink_to(at.name),
        "'labels.txt' is outside the model repository",
    ),
    "gone": (lambda at: None, "labels.txt is missing"),
    "empty": (lambda at: at.write_bytes(b""), ["2.000000:1", "1.000000:0"]),
    "binary": (
        lambda at: at.write_bytes(b"\0\xff\xfe\n\x80:\x7f"),
        ["2.000000:1:\ufffd:\x7f", "1.000000:0:\0\ufffd\ufffd"],
    ),
    "twice the same": (lambda at: at.write_text("a\na"), ["2.000000:1:a", "1.000000:0:a"]),
    "an empty line": (lambda at: at.write_text("\nb"), ["2.000000:1:b", "1.000000:0"]),
    "more than classes": (lambda at: at.write_text("a\nb\nc"), ["2.000000:1:b", "1.000000:0:a"]),
    "the longest": (
        lambda at: at.write_bytes(b"a" * directory_reader.MAX_LABEL_LENGTH),
        ["2.000000:1", f"1.000000:0:{'a' * directory_reader.MAX_LABEL_LENGTH}"],
    ),
}
"""Label files: how to create one, and either the load's error or the resulting class names."""


@pytest.mark.parametrize("name", LABELS)
async def test_a_file_of_labels_is_read_or_its_load_is_refused(
    client: Client, root: Path, name: str
) -> None:
    """The file may be of any kind and size."""
    make, expected = LABELS[name]
    file = root / "a" / "1" / "labels.txt"
    file.unlink()
    make(file)
    output = {"name": "y", "label_filename": "1/labels.txt", "data_type": "TYPE_FP32", "dims": [2]}
    given = [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}]
    config = json.dumps({"backend": "identity", "input": given, "output": [output]})
    if isinstance(expected, str):
        text = await client.refused("a", config=config)
        assert "label_filename of output 'y': " in text
        assert expected in text
        return
    await client.grpc.load_model("a", config=config)
    tensor = triton.InferInput("x", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    wanted = [triton.InferRequestedOutput("y", class_count=2)]
    answer: Any = await client.grpc.infer("a", [tensor], outputs=wanted)

    found = [one.decode(errors="replace") for one in answer.as_numpy("y").tolist()]
    assert expected == found


async def test_a_file_of_labels_that_is_cut_while_it_is_read_is_refused(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = root / "a" / "1" / "labels.txt"

    def cut(*given: Any) -> None:
        os.truncate(file, 3)

    monkeypatch.setattr(files, "check_size", cut)
    config = json.dumps(_config() | NAMING["output.label_filename"]("1/labels.txt"))

    assert "labels.txt is truncated by 4 bytes" in await client.refused("a", config=config)


async def test_labels_of_many_rows_are_charged(client: Client, root: Path) -> None:
    """Labels repeated for each row count on the ledger until the answer ends."""
    ledger = client.server.application.ledger
    (root / "a" / "1" / "labels.txt").write_bytes(b"a" * directory_reader.MAX_LABEL_LENGTH)
    config = _config(max_batch_size=MOST_CLASSES) | NAMING["output.label_filename"]("1/labels.txt")
    await client.grpc.load_model("a", config=json.dumps(config))
    tensor = triton.InferInput("x", [MOST_CLASSES, 1], "FP32")
    tensor.set_data_from_numpy(np.zeros((MOST_CLASSES, 1), np.float32))
    wanted = [triton.InferRequestedOutput("y", class_count=1)]
    await client.grpc.infer("a", [tensor], outputs=wanted)

    other = ledger.open()
    other.hold(ledger.limit - 2 * MOST_CLASSES * directory_reader.MAX_LABEL_LENGTH)
    with pytest.raises(InferenceServerException, match="the classes"):
        await client.grpc.infer("a", [tensor], outputs=wanted)
    other.close()


async def test_labels_are_limited_in_number(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_reader, "MAX_LABELS", 2)
    config = json.dumps(_config() | NAMING["output.label_filename"]("1/labels.txt"))
    await client.grpc.load_model("a", config=config)
    (root / "a" / "1" / "labels.txt").write_text("one\r\ntwo\r\n")

    assert (
        "expected at most 2 lines in the label file (2 per model), got 3"
        in await client.refused("a", config=config)
    )
