"""Model files that are overwritten in place, keeping their size and modification time."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import jax
import jax.export
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import pt2_models, python_models, tiny_embedding, tiny_language
from support.http import ask
from support.server import RunningServer, Serve

import xlaserve
from xlaserve.artifact import onnx_source
from xlaserve.residence.repository import fingerprints

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
X = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


def _exported(model: Path, factor: int) -> None:
    xlaserve.export_model(
        lambda p, x: {"y": x * p},
        np.float32(factor),
        {"x": ("FP32", [-1, 2])},
        model / "1",
        max_batch_size=1,
        platforms=["cpu"],
        exported_at=NEW_YEAR,
    )


def _plain(model: Path, factor: int) -> None:
    spec = jax.ShapeDtypeStruct((1, 2), np.float32)
    exported = jax.export.export(jax.jit(lambda x: {"y": x * np.float32(factor)}))(spec)
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.jaxexp").write_bytes(exported.serialize())
    (model / "1" / "names.json").write_text('{"inputs": ["x"], "outputs": ["y"]}')


def _configuration(model: Path, factor: int) -> None:
    _plain(model, 1)
    said = f'parameters {{ key: "factor" value {{ string_value: "{factor}" }} }}'
    (model / "config.pbtxt").write_text(said)


def _labels(model: Path, factor: int) -> None:
    _plain(model, 1)
    output = {"name": "y", "data_type": "TYPE_FP32", "dims": [1, 2], "label_filename": "labels.txt"}
    (model / "config.json").write_text(json.dumps({"output": [output]}))
    (model / "labels.txt").write_text(f"none\nlabel {factor}\n")


def _onnx(model: Path, factor: int) -> None:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor("w", TensorProto.FLOAT, [2], [factor, factor])],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (model / "1").mkdir(parents=True)
    onnx.save(made, model / "1" / "model.onnx")


def _external(model: Path, factor: int) -> None:
    """Write an ONNX model with external tensors."""
    _onnx(model, factor)
    path = model / "1" / "model.onnx"
    loaded = onnx.load(path)
    onnx.save(loaded, path, save_as_external_data=True, location="w.bin", size_threshold=0)


def _pt2(model: Path, factor: int) -> None:
    files = pt2_models.files_of("fixed")
    weights = np.frombuffer(files["data/weights/weight_0"], np.float32) * np.float32(factor)
    (model / "1").mkdir(parents=True)
    data = pt2_models.packed({**files, "data/weights/weight_0": weights.tobytes()})
    (model / "1" / "model.pt2").write_bytes(data)


def _python(model: Path, factor: int) -> None:
    body = "from helper import FACTOR\nreturn {'y': x * np.float32(FACTOR)}"
    version = python_models.write_function(model.parent, model.name, body)
    (version / "helper.py").write_text(f"FACTOR = {factor}\n")


def _generator(model: Path, factor: int) -> None:
    version = tiny_language.export(model / "1")
    weights = bytearray((version / "params.safetensors").read_bytes())
    before = hashlib.sha256(weights).hexdigest()
    # The last bytes of the file belong to a tensor that affects the tokens.
    last = np.frombuffer(bytes(weights[-4096:]), np.float32) * np.float32(3 - 2 * factor)
    weights[-4096:] = last.tobytes()
    (version / "params.safetensors").write_bytes(weights)
    described = version / "generator.json"
    after = hashlib.sha256(weights).hexdigest()
    described.write_text(described.read_text().replace(before, after))
    parameters = {"slots": "1", "windows": "16", "chunk": "8"}
    written = {name: {"string_value": value} for name, value in parameters.items()}
    (model / "config.json").write_text(json.dumps({"parameters": written}))


def _tokenizer(model: Path, factor: int) -> None:
    tiny_embedding.export(model)
    file = model / "1" / "tokenizer.json"
    said = json.loads(file.read_text())
    vocab = said["model"]["vocab"]
    if factor == 2:
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(said))


def _tensor(shape: list[int], name: str = "x", datatype: str = "FP32") -> Any:
    data = [(n % 5) + 1 for n in range(int(np.prod(shape)))]
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


async def _inferred(server: RunningServer, model: str, **said: Any) -> Any:
    assert server.http is not None
    body = json.dumps({"inputs": [X], **said}).encode()
    found = await ask(server.http, "POST", f"/v2/models/{model}/infer", body=body)
    assert 200 == found.status, found.body
    return found.json["outputs"]


async def _vector(server: RunningServer, model: str) -> Any:
    return await _inferred(server, model, inputs=[_tensor([2])])


async def _classified(server: RunningServer, model: str) -> Any:
    return await _inferred(
        server, model, outputs=[{"name": "y", "parameters": {"classification": 1}}]
    )


async def _of_pt2(server: RunningServer, model: str) -> Any:
    inputs, _ = pt2_models.answers("fixed")
    assert server.http is not None
    found = (await ask(server.http, "GET", f"/v2/models/{model}")).json["inputs"]
    tensors = [
        {
            **_tensor(list(array.shape), spec["name"], spec["datatype"]),
            "data": array.ravel().tolist(),
        }
        for spec, array in zip(found, inputs, strict=True)
    ]
    return await _inferred(server, model, inputs=tensors)


async def _configured(server: RunningServer, model: str) -> Any:
    assert server.http is not None
    found = await ask(server.http, "GET", f"/v2/models/{model}/config")
    return found.json["parameters"]


async def _generated(server: RunningServer, model: str) -> Any:
    said = {"tokens": [1, 2, 3], "max_tokens": 8}
    url = f"http://{server.http}/v2/models/{model}/generate_stream"
    async with aiohttp.ClientSession() as session, session.post(url, json=said) as found:
        text = await found.text()
    assert 200 == found.status, text
    return [json.loads(line[6:])["token"] for line in text.splitlines() if '"token"' in line]


async def _embedded(server: RunningServer, model: str) -> Any:
    assert server.http is not None
    said = json.dumps({"model": model, "input": "ab a"}).encode()
    found = await ask(server.http, "POST", "/v1/embeddings", body=said)
    assert 200 == found.status, found.body
    return found.json["data"]


KINDS: Mapping[str, tuple[Callable[[Path, int], None], Callable[[RunningServer, str], Any]]] = {
    "exported": (_exported, _inferred),
    "plain": (_plain, _inferred),
    "configuration": (_configuration, _configured),
    "labels": (_labels, _classified),
    "onnx": (_onnx, _inferred),
    "external": (_external, _inferred),
    "pt2": (_pt2, _of_pt2),
    "python": (_python, _vector),
    "generator": (_generator, _generated),
    "tokenizer": (_tokenizer, _embedded),
}


SLOW = ("onnx", "external", "pt2", "generator", "tokenizer")
"""Kinds whose readers take seconds to import, or that compile many programs."""
GROUPS = [
    [kind for kind in KINDS if kind not in SLOW],
    pytest.param(SLOW, marks=pytest.mark.slow),
]


def _overwrite(target: Path, source: Path) -> None:
    """Overwrite a model's files with another model's, keeping sizes and times."""
    changed = 0
    for file in filter(Path.is_file, sorted(source.rglob("*"))):
        there, data = target / file.relative_to(source), file.read_bytes()
        before = there.stat()
        assert before.st_size == len(data), there.name
        if data != there.read_bytes():
            with there.open("r+b") as opened:
                opened.write(data)
            os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))
            changed += 1
    assert changed


@pytest.fixture
def root(tmp_path: Path, kinds: Sequence[str]) -> Path:
    """Return a repository with the old and the new form of each kind."""
    root = tmp_path / "repository"
    for kind in kinds:
        for name, factor in ((kind, 1), (f"{kind}-after", 2)):
            KINDS[kind][0](root / name, factor)
    return root


async def _load(server: RunningServer, model: str) -> None:
    assert server.http is not None
    found = await ask(server.http, "POST", f"/v2/repository/models/{model}/load")
    assert 200 == found.status, found.body


def _same_mark(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return the file mark on a file system without change times."""
    return status.st_ino, status.st_size, status.st_mtime_ns, 0


@pytest.mark.parametrize("kinds", GROUPS)
@pytest.mark.parametrize("keeps_changes", [True, False])
async def test_a_load_serves_what_was_overwritten(
    root: Path,
    kinds: Sequence[str],
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    keeps_changes: bool,
) -> None:
    """A load always serves the current files, even if only their content differs."""
    if not keeps_changes:
        monkeypatch.setattr(fingerprints, "mark_of", _same_mark)
        monkeypatch.setattr(onnx_source, "mark_of", _same_mark)
    settings = {"http_endpoint": "port:0", "allow_python_models": True}
    async with serve(root, load_model=("*",), **settings) as server:
        for kind in kinds:
            answer = KINDS[kind][1]
            before = await answer(server, kind)
            expected = await answer(server, f"{kind}-after")
            _overwrite(root / kind, root / f"{kind}-after")
            await _load(server, kind)
            found = [await answer(server, kind) for _ in range(3)]

            assert before != expected, kind
            assert [expected] * 3 == found, kind


@pytest.mark.parametrize("kinds", GROUPS)
async def test_a_poll_sees_what_was_overwritten(
    root: Path, kinds: Sequence[str], serve: Serve
) -> None:
    settings = {"http_endpoint": "port:0", "allow_python_models": True}
    async with serve(root, model_control_mode="poll", **settings) as server:
        expected = {kind: await KINDS[kind][1](server, f"{kind}-after") for kind in kinds}
        await server.application.control.follower.poll()
        for kind in kinds:
            _overwrite(root / kind, root / f"{kind}-after")
        await server.application.control.follower.poll()

        assert expected == {kind: await KINDS[kind][1](server, kind) for kind in kinds}
