"""Unsupported model formats of other servers, with advice for error messages.

Each has the name of a Triton backend or platform, the runtime that it needs, and its files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

_TO_ONNX = "or write it in JAX, and use `xlaserve export`"


@dataclass(frozen=True, slots=True)
class Foreign:
    """An unsupported model format."""

    runtime: str
    """The library that executes models of this format."""
    advice: str
    """How to convert the model."""
    files: tuple[str, ...] = ()
    """File names that identify this format in a version directory."""


_TENSORFLOW = f"convert it to ONNX (python -m tf2onnx.convert), {_TO_ONNX} (jax2tf)"
_SAVED_MODEL = Foreign("TensorFlow", _TENSORFLOW, ("model.savedmodel",))
_GRAPH = Foreign("TensorFlow", _TENSORFLOW, ("model.graphdef",))
_TENSORRT = Foreign("TensorRT", "serve the ONNX model the plan was built from", ("model.plan",))
_TORCH = Foreign(
    "PyTorch",
    f"save it with torch.export as model.pt2, export it to ONNX (torch.onnx.export), {_TO_ONNX}",
    ("model.pt",),
)
_OPENVINO = Foreign("OpenVINO", "serve the ONNX model it was converted from", ("model.xml",))
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
"""Unsupported formats by `backend` or `platform`."""


def advice(kind: str) -> str:
    """Return advice for an unsupported format, or an empty string if it is unknown."""
    row = FOREIGN.get(kind)
    return f": it needs {row.runtime}; {row.advice}" if row else ""


def recognise(directory: Path) -> str:
    """Describe the unsupported format of a version directory; an empty string if unknown."""
    for kind, row in FOREIGN.items():
        for name in row.files:
            if (directory / name).exists():
                return f"'{name}' is a {kind} model{advice(kind)}"
    return ""
