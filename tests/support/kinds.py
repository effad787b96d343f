"""Every kind of model that our exporters and importers write, with requests for each.

Each kind is a row: tests write all of them, and `tools/lasts.py` checks that models written under
one version of JAX can be served under another.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

import xlaserve
from support import (
    checkpoints,
    encoders,
    onnx_models,
    pt2_models,
    python_models,
    sequence_models,
    stepped,
    tiny_embedding,
    tiny_language,
)
from xlaserve.artifact import artifact
from xlaserve.authoring import adopting
from xlaserve.importers.huggingface import importing as language_importing
from xlaserve.importers.huggingface.encoders import importing as encoder_importing
from xlaserve.importers.onnx import importing as onnx_importing
from xlaserve.importers.pt2 import importing as pt2_importing

Json = dict[str, Any]
SQUARE = [[4.0, 1.0, 0.0], [1.0, 3.0, 1.0], [0.0, 1.0, 2.0]]
X = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, -2, 3, 0.5]}


@dataclass(frozen=True)
class Kind:
    """A kind of model: how to write it, and a request for it."""

    write: Callable[[Path], object]
    """Writes the model directory."""
    inputs: list[Json] | None = None
    """Inputs of an inference request; None if `asked` is the body instead."""
    path: str = "infer"
    asked: Json | None = None
    parameters: Json | None = None


def _square(fn: Callable[..., Any]) -> Kind:
    """Return a kind whose model maps one fixed-size matrix, for all supported platforms."""

    def write(model: Path) -> None:
        xlaserve.export_model(
            lambda params, a: {"y": fn(a)}, None, {"a": ("FP32", [3, 3])}, model / "1"
        )

    data = [number for row in SQUARE for number in row]
    return Kind(write, [{"name": "a", "datatype": "FP32", "shape": [3, 3], "data": data}])


def _layers(params: Any, x: Any) -> Any:
    return {"y": jnp.tanh(x @ params["w"]) + jnp.cumsum(x, axis=1)}


def _exported(model: Path) -> None:
    w = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    xlaserve.export_model(_layers, {"w": w}, {"x": ("FP32", [-1, 4])}, model / "1")


def _sums(model: Path) -> None:
    xlaserve.export_model(
        lambda params, x: {
            "sums": jnp.cumsum(x, axis=1),
            "most": jax.lax.cummax(x, axis=1),
            "unique": jnp.unique(x, size=4),
        },
        None,
        {"x": ("FP32", [1, 4])},
        model / "1",
    )


def _generator(model: Path) -> None:
    tiny_language.export(model / "1")
    said = {"slots": "1", "windows": "16", "chunk": "8"}
    parameters = {name: {"string_value": value} for name, value in said.items()}
    (model / "config.json").write_text(json.dumps({"parameters": parameters}))


def _sequence(model: Path) -> None:
    sequence_models.export_fold(model.parent, model.name)
    state = sequence_models.STATE.replace("INITIAL", "")
    (model / "config.pbtxt").write_text(
        f"sequence_batching {{ {sequence_models.CONTROLS} {state} }}"
    )


def _counter(model: Path) -> None:
    stepped.export_counter(model / "1")


def _plain(model: Path) -> None:
    _write_plain(model / "1" / "model.jaxexp")


def _write_plain(path: Path) -> None:
    spec = jax.ShapeDtypeStruct((1, 4), np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    exported = jax.export.export(jax.jit(lambda x: {"y": x * np.float32(3)}))(spec)
    path.write_bytes(exported.serialize())


def _adopted(model: Path) -> None:
    source = model.parent / "source.jaxexp"
    _write_plain(source)
    adopting.read(source, adopting.Options()).write(model / "1")
    source.unlink()


def _onnx(model: Path) -> None:
    import onnx

    nodes = [onnx_models.node("CumSum", ["x", "axis"], ["y"])]
    made = onnx_models.model(nodes, onnx_models.X, ["y"], {"axis": np.array(1, np.int64)})
    source = model.parent / "source.onnx"
    onnx.save(made, source)
    onnx_importing.import_model(source, model, onnx_importing.Options())
    source.unlink()


def _served_onnx(model: Path) -> None:
    import onnx

    (model / "1").mkdir(parents=True)
    made = onnx_models.model([onnx_models.node("Tanh", ["x"], ["y"])], onnx_models.X, ["y"])
    onnx.save(made, model / "1" / "model.onnx")


def _pt2(model: Path) -> None:
    pt2_importing.import_program(pt2_models.path("mlp"), model, pt2_importing.Options())


def _served_pt2(model: Path) -> None:
    (model / "1").mkdir(parents=True)
    shutil.copy(pt2_models.path("mlp"), model / "1" / "model.pt2")


def _python(model: Path) -> None:
    python_models.write_function(model.parent, model.name, "return {'y': x * np.float32(2)}")


def _encoder(model: Path) -> None:
    source = model.parent / "source"
    shutil.copytree(encoders.DATA / "bert", source)
    encoders.write_tensors(source, "bert")
    encoder_importing.import_encoder(source, model, lengths=[8])
    shutil.rmtree(source)


def _language(model: Path) -> None:
    source = model.parent / "source"
    source.mkdir()
    checkpoints.write_tensors(source, "llama")
    shutil.copy(checkpoints.DATA / "llama" / "config.json", source)
    language_importing.import_checkpoint(source, model)
    shutil.rmtree(source)
    said = {"slots": "1", "windows": "16", "chunk": "8", "length": "16"}
    parameters = {name: {"string_value": value} for name, value in said.items()}
    (model / "config.json").write_text(json.dumps({"parameters": parameters}))


def _ensemble(model: Path) -> None:
    (model / "1").mkdir(parents=True)
    tensor = {"data_type": "TYPE_FP32", "dims": [-1, 4]}
    step = {"model_name": "exported", "model_version": -1, "input_map": {"x": "x"}}
    said = {
        "platform": "ensemble",
        "input": [tensor | {"name": "x"}],
        "output": [tensor | {"name": "z"}],
        "ensemble_scheduling": {"step": [step | {"output_map": {"y": "z"}}]},
    }
    (model / "config.json").write_text(json.dumps(said))


_PROGRAM = [{**X, "name": "input"}]
_TOKENS = {"tokens": [1, 2, 3], "max_tokens": 6}
_CONTROLLED: list[Json] = [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [7]}]

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "exported": Kind(_exported, [X]),
        "sums": Kind(_sums, [X]),
        "eigvalsh": _square(jnp.linalg.eigvalsh),
        "solve": _square(lambda a: jnp.linalg.solve(a, a[:, 0])),
        "qr": _square(lambda a: jnp.abs(jnp.linalg.qr(a)[1])),
        "svd": _square(lambda a: jnp.linalg.svd(a, compute_uv=False)),
        "cholesky": _square(jnp.linalg.cholesky),
        "det": _square(jnp.linalg.det),
        "fft": _square(lambda a: jnp.abs(jnp.fft.fft2(a))),
        "random": _square(lambda a: a + jax.random.normal(jax.random.key(3), (3, 3), jnp.float32)),
        "generator": Kind(_generator, path="generate", asked=_TOKENS),
        "language": Kind(_language, path="generate", asked=_TOKENS),
        "sequence": Kind(
            _sequence,
            _CONTROLLED,
            parameters={"sequence_id": 5, "sequence_start": True, "sequence_end": True},
        ),
        "counter": Kind(_counter, path="generate_stream", asked={"start": 3, "count": 2}),
        "embedding": Kind(tiny_embedding.export, path="/v1/embeddings", asked={"input": [1, 2, 3]}),
        "encoder": Kind(_encoder, path="/v1/embeddings", asked={"input": [1, 2, 3]}),
        "plain": Kind(_plain, [{**X, "name": "input_0"}]),
        "adopted": Kind(_adopted, [{**X, "name": "input_0"}]),
        "onnx": Kind(_onnx, [X]),
        "served_onnx": Kind(_served_onnx, [X]),
        "pt2": Kind(_pt2, _PROGRAM),
        "served_pt2": Kind(_served_pt2, _PROGRAM),
        "python": Kind(_python, [{**X, "shape": [4]}]),
        "ensemble": Kind(_ensemble, [X]),
    }
)


def write(root: Path, names: Iterator[str] | None = None) -> None:
    """Write a repository of models, each named after its kind."""
    root.mkdir(parents=True, exist_ok=True)
    for name in names or KINDS:
        KINDS[name].write(root / name)


def programs(root: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield each StableHLO module in a repository: model, file name, and bytes."""
    for path in sorted((*root.rglob("*.jaxexp"), *root.rglob("*.stablehlo"))):
        data = path.read_bytes()
        if path.suffix == ".jaxexp":
            data = artifact.deserialize(bytearray(data), name=path.name).mlir_module_serialized
        yield path.relative_to(root).parts[0], path.name, data


def request(name: str) -> tuple[str, Json]:
    """Return the path and body of a request to a kind."""
    kind = KINDS[name]
    if kind.path.startswith("/"):
        return kind.path, {"model": name, **(kind.asked or {})}
    body = kind.asked or {"inputs": kind.inputs}
    if kind.parameters:
        body = {**body, "parameters": kind.parameters}
    return f"/v2/models/{name}/{kind.path}", body


def numbers(answer: str) -> list[float]:
    """Return all numbers in an answer, in order, to compare the answers of two models."""
    return [float(text) for text in _NUMBER.findall(_WITHOUT.sub("", answer))]


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")
_WITHOUT = re.compile(
    r'"(?:id|created|model_version|model_name|model|object|datatype)":("[^"]*"|\d+)'
)


WRITERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "export_model": ("exported", "sums", "sequence", "embedding"),
        "export_stream": ("counter",),
        "export_generator": ("generator",),
        "read": ("adopted",),
        "import_model": ("onnx",),
        "import_program": ("pt2",),
        "import_encoder": ("encoder",),
        "import_checkpoint": ("language",),
    }
)
"""Kinds that each function writes; `read` is `adopting.read`."""

LOADERS: Mapping[str, str] = MappingProxyType(
    {
        "xlaserve.runtime.exported.jax_export": "exported",
        "xlaserve.runtime.exported.single_file": "plain",
        "xlaserve.generation.loading": "generator",
        "xlaserve.python_models.loading": "python",
        "xlaserve.importers.onnx.loading": "served_onnx",
        "xlaserve.importers.pt2.loading": "served_pt2",
        "xlaserve.runtime.identity": "",
    }
)
"""The kind that each module loads; empty if the module reads no files."""
