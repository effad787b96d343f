"""Models for the tests of answer forms: one per kind of station and per wrapper.

Each returns `x` as `a` and `z` as `b`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

import xlaserve

LABELS = ("cat", "d\u00f6g")
"""Class labels of every output."""


@dataclass(frozen=True)
class Model:
    """A model to test with."""

    name: str
    says: str
    """The request property that selects the model."""
    kind: str
    """Name of its row in the table of stations."""
    config: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    export: Callable[[Path], None] | None = None
    many: bool = False
    """Whether it is decoupled, so that it is asked over streams."""
    of_sequences: bool = False
    dims: Sequence[int] = (2,)

    def write(self, root: Path) -> None:
        """Write the model into a repository."""
        version = root / self.name / "1"
        if self.export is None:
            version.mkdir(parents=True)
        else:
            self.export(version)
        if self.code:
            (version / "model.py").write_text(self.code)
        dims = list(self.dims)
        tensors = [
            {"data_type": "TYPE_FP32", "dims": dims, "name": n} for n in ("x", "z", "a", "b")
        ]
        outputs = [{**tensor, "label_filename": "labels.txt"} for tensor in tensors[2:]]
        config = {"max_batch_size": 4, "input": tensors[:2], "output": outputs, **self.config}
        (root / self.name / "config.json").write_text(json.dumps(config))
        (root / self.name / "labels.txt").write_text("\n".join(LABELS) + "\n")


_OWN = """
from xlaserve import PythonModel

class Model(PythonModel):
    batched = {batched}
    def infer(self, inputs):
        {gives} {{"a": inputs["x"], "b": inputs["z"]}}
"""
_TRITON = """
import triton_python_backend_utils as pb_utils

def answer(request):
    found = {"a": pb_utils.get_input_tensor_by_name(request, "x").as_numpy(),
             "b": pb_utils.get_input_tensor_by_name(request, "z").as_numpy()}
    return pb_utils.InferenceResponse([pb_utils.Tensor(*one) for one in found.items()])
"""
_TOGETHER = f"""{_TRITON}
class TritonPythonModel:
    def execute(self, requests):
        return [answer(request) for request in requests]
"""
_APART = f"""{_TRITON}
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(answer(request), flags=flags)
"""


def _export_stepped(path: Path) -> None:
    def step(params: Any, state: Any, x: jax.Array, z: jax.Array) -> Any:
        return state, {"a": x, "b": z}, state["n"] >= 0

    def begin(params: Any, x: jax.Array, z: jax.Array) -> Any:
        return {"n": jax.numpy.zeros((), jax.numpy.int32)}

    inputs: dict[str, Any] = {name: ("FP32", [1, 2]) for name in ("x", "z")}
    xlaserve.export_stream(step, params=None, inputs=inputs, begin=begin, path=path, max_steps=4)


def _export_on_demand(path: Path) -> None:
    """Export a model that compiles on demand and so never runs on the event loop."""

    def model(params: Any, x: jax.Array, z: jax.Array) -> dict[str, jax.Array]:
        return {"a": x, "b": z}

    inputs: dict[str, Any] = {name: ("FP32", [-1, "s"]) for name in ("x", "z")}
    more: dict[str, Any] = {"compiled_shapes": {"s": [1]}, "max_on_demand_shapes": 2}
    xlaserve.export_model(model, None, inputs, path, max_batch_size=4, **more)


def _python(**more: Any) -> dict[str, Any]:
    return {"backend": "python", "parameters": {"execution": {"string_value": "threads"}}, **more}


_IDENTITY = {"backend": "identity"}
_DECOUPLED = {"max_batch_size": 0, "model_transaction_policy": {"decoupled": True}}
_START = {"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}
_LEVELS = {"priority_levels": 2, "default_priority_level": 1}
_STEP = {
    "model_name": "pair",
    "model_version": -1,
    "input_map": {"x": "x", "z": "z"},
    "output_map": {"a": "a", "b": "b"},
}

MODELS = (
    Model("pair", "plain", "inline", _IDENTITY),
    Model("cached", "response cache", "inline", {**_IDENTITY, "response_cache": {"enable": True}}),
    Model(
        "ordered",
        "kept order",
        "inline",
        {**_IDENTITY, "dynamic_batching": {"preserve_ordering": True}},
    ),
    Model(
        "levels",
        "priority levels",
        "batched on the host",
        {**_IDENTITY, "dynamic_batching": _LEVELS},
    ),
    Model(
        "ensemble",
        "ensemble",
        "ensemble",
        {"platform": "ensemble", "ensemble_scheduling": {"step": [_STEP]}},
    ),
    Model("own", "code", "handed over", _python(), _OWN.format(batched=False, gives="return")),
    Model(
        "batched",
        "code in batches",
        "handed over",
        _python(),
        _OWN.format(batched=True, gives="return"),
    ),
    Model("triton", "code of Triton", "handed over", _python(), _TOGETHER),
    Model(
        "series",
        "sequences",
        "sequences",
        _python(
            sequence_batching={
                "oldest": {"max_candidate_sequences": 64},
                "control_input": [{"name": "START", "control": [_START]}],
            }
        ),
        _TOGETHER,
        of_sequences=True,
    ),
    Model("demand", "a shape on demand", "in threads", export=_export_on_demand, dims=[-1]),
    Model(
        "many",
        "many of code",
        "handed over",
        _python(**_DECOUPLED),
        _OWN.format(batched=False, gives="yield"),
        many=True,
        dims=[1, 2],
    ),
    Model(
        "apart",
        "many of Triton",
        "handed over",
        _python(**_DECOUPLED),
        _APART,
        many=True,
        dims=[1, 2],
    ),
    Model(
        "stepped",
        "generator",
        "generator",
        {"max_batch_size": 0},
        export=_export_stepped,
        many=True,
        dims=[1, 2],
    ),
)
NOT_HERE = {
    "in another process": "each of these is, behind front ends",
    "ragged": "outputs of the shape of their input",
    "alone on a device": "a device",
    "batched on a device": "a device",
}
"""Station kinds that have no row here, with the reason."""
