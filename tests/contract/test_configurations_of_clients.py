"""A configuration that a client sends names files of its own model alone."""

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import asking, identity_models
from support.asking import Client
from support.http import ask
from support.server import Serve

from xlaserve.model_config.fields import FIELDS
from xlaserve.residence.repository import directory_reader

SECRET = "the secret of b"
TENSOR = {"data_type": "TYPE_FP32", "dims": [1]}
OUTSIDE = ("../b/1/secret.txt", "1/../../b/1/secret.txt", "{root}/b/1/secret.txt", "1/link.txt")
"""Ways out of the directory of model a; the last is a link in it."""


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
"""By the fields that name a file: what names it."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two tenants' models, of which b has a secret, and a link to that lies with a."""
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
    """Nor do texts tell whether something is there."""
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
    """Who writes it is the operator."""
    config = _config() | NAMING["output.label_filename"]("../b/1/secret.txt")
    (root / "a" / "config.json").write_text(json.dumps(config))
    await client.grpc.load_model("a")

    assert json.dumps([SECRET]) == await _labels(client)


async def test_labels_are_limited_in_number(
    client: Client, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_reader, "MAX_LABELS", 2)
    config = json.dumps(_config() | NAMING["output.label_filename"]("1/labels.txt"))
    await client.grpc.load_model("a", config=config)
    (root / "a" / "1" / "labels.txt").write_text("one\r\ntwo\r\n")

    assert (
        "expected at most 2 label lines per model, 2 of them here, got 3"
        in await client.refused("a", config=config)
    )
