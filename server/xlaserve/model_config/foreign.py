"""Model formats of other servers that this one refuses, with advice for each.

A row is data for an error text: the name of a backend or platform as Triton has it, the runtime
that it needs, and the file that it loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_TO_ONNX = "or write it in JAX, and use `xlaserve export`"


@dataclass(frozen=True, slots=True)
class Foreign:
    """An unsupported kind of model."""

    runtime: str
    """The library that would have to run it."""
    advice: str
    """How to convert the model."""
    files: tuple[str, ...] = ()
    """Names in a version directory that tell this kind."""


_TENSORFLOW = f"convert it to ONNX (python -m tf2onnx.convert), {_TO_ONNX} (jax2tf)"
_SAVED_MODEL = Foreign("TensorFlow", _TENSORFLOW, ("model.savedmodel",))
_GRAPH = Foreign("TensorFlow", _TENSORFLOW, ("model.graphdef",))
_TENSORRT = Foreign(
    "TensorRT", "serve the ONNX model that its plan was built from", ("model.plan",)
)
_TORCH = Foreign(
    "PyTorch",
    "save what torch.export.export makes of it as model.pt2, export it to ONNX "
    f"(torch.onnx.export), {_TO_ONNX}",
    ("model.pt",),
)
_OPENVINO = Foreign("OpenVINO", "serve the ONNX model that it was converted from", ("model.xml",))
_TREES = Foreign("trees", "serve it from a Python model (backend python)")
_VIDEO = Foreign("DALI", "do the preprocessing in JAX, or in a Python model (backend python)")
_LANGUAGE = Foreign("a language model's own engine", "serve it from a Python model, or in JAX")

FOREIGN: Mapping[str, Foreign] = MappingProxyType(
    {
        "tensorflow_savedmodel": _SAVED_MODEL,
        "tensorflow_graphdef": _GRAPH,
        "tensorflow": _SAVED_MODEL,
        "tensorrt_plan": _TENSORRT,
        "tensorrt": _TENSORRT,
        "pytorch_libtorch": _TORCH,
        "pytorch": _TORCH,
        "openvino": _OPENVINO,
        "caffe2_netdef": Foreign("Caffe2", "convert it to ONNX", ("model.netdef",)),
        "fil": _TREES,
        "dali": _VIDEO,
        "vllm": _LANGUAGE,
        "tensorrtllm": _LANGUAGE,
    }
)
"""Rows by `backend` or `platform`."""


def advice(kind: str) -> str:
    """Return advice for an unsupported kind of model; empty for an unknown one."""
    row = FOREIGN.get(kind)
    return f": it needs {row.runtime}; {row.advice}" if row else ""


def recognise(directory: Path) -> str:
    """Name the format of an unsupported version directory; empty if unknown."""
    for kind, row in FOREIGN.items():
        for name in row.files:
            if (directory / name).exists():
                return f"'{name}' is a model of {kind}{advice(kind)}"
    return ""
