"""Translates MLServer's `model-settings.json` into a configuration."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.model_config.fields import CONTENT_TYPE
from xlaserve.tensors import DATATYPES

FILE_NAME = "model-settings.json"
KIND = "mlserver"

_LIMIT_BYTES = 1 << 20
_SHOWN = 200
_OF_RUNTIMES: Mapping[str, str] = MappingProxyType(
    {
        "mlserver_sklearn": "convert the model to ONNX (skl2onnx), or call it from a Python model",
        "mlserver_xgboost": "convert it to ONNX (onnxmltools), or call it from a Python model",
        "mlserver_lightgbm": "convert it to ONNX (onnxmltools), or call it from a Python model",
        "mlserver_catboost": "save the model as ONNX, or call it from a Python model",
        "mlserver_mlflow": "call the model from a Python model",
        "mlserver_onnx": "put the ONNX file at 1/model.onnx and remove the backend",
        "mlserver_huggingface": "call the pipeline from a Python model, or export it to ONNX",
        "mlserver_alibi_explain": "call the explainer from a Python model",
        "mlserver_alibi_detect": "call the detector from a Python model",
    }
)
"""Advice for unsupported runtimes, by the package of the `implementation`."""


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int] = []
    parameters: dict[str, Any] | None = None


class _Settings(msgspec.Struct):
    name: str = ""
    implementation: str = ""
    platform: str = ""
    inputs: list[_Tensor] = []
    outputs: list[_Tensor] = []
    max_batch_size: int = 0
    max_batch_time: float = 0.0
    parallel_workers: int | None = None
    cache_enabled: bool = False
    parameters: dict[str, Any] | None = None

    @property
    def is_batched(self) -> bool:
        """Tell whether MLServer would batch requests: it needs both a size and a time."""
        return self.max_batch_size > 1 and self.max_batch_time > 0

    @property
    def content_types(self) -> dict[str, str]:
        """Return the content types as our parameters."""
        tensors = (*self.inputs, *self.outputs)
        parameters = {
            CONTENT_TYPE: self.parameters,
            **{_of(one): one.parameters for one in tensors},
        }
        found = {key: (given or {}).get(CONTENT_TYPE) for key, given in parameters.items()}
        return {key: str(kind) for key, kind in found.items() if kind}


def _of(tensor: _Tensor) -> str:
    return f"{CONTENT_TYPE}.{tensor.name}"


@dataclass(frozen=True, slots=True)
class StandsFor:
    """The configuration that replaces MLServer's settings."""

    pbtxt: str
    """The equivalent `config.pbtxt`."""
    notes: tuple[str, ...]
    """Manual steps that the configuration cannot express."""


def read(directory: Path, roots: Roots = ANYWHERE) -> StandsFor | None:
    """Translate the settings in a model's directory; None if there are none.

    Raises InvalidModel for settings that are unreadable or outside the roots.
    """
    if not (directory / FILE_NAME).exists():
        return None
    data = files.read_checked(directory, FILE_NAME, limit_bytes=_LIMIT_BYTES, roots=roots)
    try:
        found = msgspec.json.decode(data, type=_Settings)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidModel(f"{FILE_NAME}: {str(error)[:_SHOWN]}") from None
    return StandsFor("\n".join(_lines(found)) + "\n", tuple(_notes(directory, found)))


def _lines(found: _Settings) -> Iterator[str]:
    if found.name:
        yield f"name: {_text(found.name)}"
    yield 'backend: "python"'
    batch = found.max_batch_size if found.is_batched else 0
    yield f"max_batch_size: {batch}"
    for kind, tensors in (("input", found.inputs), ("output", found.outputs)):
        for tensor in tensors:
            yield f"{kind} [ {{ {_tensor(tensor, is_batched=bool(batch))} }} ]"
    if batch:
        delay = round(found.max_batch_time * 1e6)
        yield f"dynamic_batching {{ max_queue_delay_microseconds: {delay} }}"
    if found.parallel_workers and found.parallel_workers > 1:
        yield f"instance_group [ {{ kind: KIND_CPU count: {found.parallel_workers} }} ]"
    if found.cache_enabled:
        yield "response_cache { enable: true }"
    for key, kind in found.content_types.items():
        yield f"parameters {{ key: {_text(key)} value {{ string_value: {_text(kind)} }} }}"


def _tensor(tensor: _Tensor, *, is_batched: bool) -> str:
    datatype = DATATYPES.get(tensor.datatype)
    shape = tensor.shape[1:] if is_batched else tensor.shape
    dims = ", ".join(map(str, shape or [1]))
    kind = datatype.config_name if datatype else "TYPE_STRING"
    return f"name: {_text(tensor.name)} data_type: {kind} dims: [ {dims} ]"


def _text(value: str) -> str:
    # JSON's escapes are valid in the text format too, as long as they are ASCII.
    return json.dumps(value)


def _notes(directory: Path, found: _Settings) -> Iterator[str]:
    package = found.implementation.partition(".")[0]
    if advice := _OF_RUNTIMES.get(package):
        yield f"implementation {found.implementation}: {advice}"
    elif found.implementation:
        yield (
            f"implementation {found.implementation}: put its code at 1/model.py, as an xlaserve"
            " class (docs/python-models.md), and this configuration next to the directory 1"
        )
    yield from (text for holds, text in _NOT_SAID if holds(found))
    for tensor in (*found.inputs, *found.outputs):
        if tensor.datatype not in DATATYPES:
            name, datatype = tensor.name[:_SHOWN], tensor.datatype[:_SHOWN]
            yield f"tensor '{name}': unknown datatype '{datatype}'"


_NOT_SAID: tuple[tuple[Callable[[_Settings], bool], str], ...] = (
    (
        lambda found: bool((found.parameters or {}).get("extra")),
        "parameters.extra: read these in the code, from a file in its directory",
    ),
    (
        lambda found: bool(found.content_types),
        "content_type: a class with decoded = True gets decoded inputs",
    ),
    (
        lambda found: found.is_batched,
        "max_batch_size: here it also limits the rows of a request",
    ),
    (
        lambda found: bool((found.parameters or {}).get("version")),
        "parameters.version: here it is the name of the version directory",
    ),
    (
        lambda found: bool((found.parameters or {}).get("uri")),
        "parameters.uri: put these files into the version directory",
    ),
    (
        lambda found: bool((found.parameters or {}).get("environment_tarball")),
        "parameters.environment_tarball: install its packages in the server's environment",
    ),
)
