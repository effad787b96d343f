"""Wraps a model whose inputs or outputs are numbers written as text."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from xlaserve.artifact.manifest import Manifest
from xlaserve.errors import InvalidModel, InvalidTensor
from xlaserve.importers.onnx.texts import BYTES, Texts
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.runtime.loaded import LoadedModel, ModelInfo, Value
from xlaserve.runtime.wrappers.around import AroundModel
from xlaserve.tensors import Datatype, Tensor, TensorSpec

_INTEGER = re.compile(rb"[+-]?[0-9]+")
_SHOWN = 40
_DIGITS = {2: "%.5g", 4: "%.8g", 8: "%.17g"}
"""printf formats that match onnxruntime's output, by the size of the float in bytes."""


def with_numbers(config: ModelConfig, texts: Texts, described: Manifest) -> ModelConfig:
    """Return the configuration of the inner model, in which text tensors are numbers.

    Raises InvalidModel if the configuration declares a number where the model has text.
    """
    names = texts.inputs.keys() | texts.outputs
    numbers = {spec.name: spec.datatype for spec in (*described.inputs, *described.outputs)}

    def of(tensor: ConfigTensor) -> ConfigTensor:
        if tensor.name not in names:
            return tensor
        if tensor.datatype is not BYTES:
            raise InvalidModel(
                f"tensor '{tensor.name}': expected BYTES as in the model, got "
                f"{tensor.datatype.name} from the configuration"
            )
        return replace(tensor, datatype=numbers[tensor.name])

    return replace(
        config, inputs=tuple(map(of, config.inputs)), outputs=tuple(map(of, config.outputs))
    )


class TextModel(AroundModel):
    """Parses and formats a model's text tensors on the host, in a worker thread.

    Requests are not batched, so that an invalid number fails only its own request.
    """

    on_demand = None
    dispatching = None
    batch_limit = 0

    def __init__(self, model: str, inner: LoadedModel, texts: Texts) -> None:
        if inner.on_demand is not None:
            raise InvalidModel("string inputs require a max_batch_size")
        for name in inner.info.optional:
            if name in texts.inputs:
                raise InvalidModel(f"input '{name}' is optional, which string inputs cannot be")
        self._model = model
        self._inner = inner
        self._texts = texts
        self.replicas = inner.replicas

    @property
    def info(self) -> ModelInfo:
        """Describe the model as clients see it."""
        info, texts = self._inner.info, self._texts
        return replace(
            info,
            inputs=tuple(_shown(spec, spec.name in texts.inputs) for spec in info.inputs),
            outputs=tuple(_shown(spec, spec.name in texts.outputs) for spec in info.outputs),
        )

    def execute(
        self, inputs: Mapping[str, Value], *, resident: bool = False, replica: int = 0
    ) -> Mapping[str, Value]:
        """Execute the model; raises InvalidTensor for a text that is not a number."""
        read = self._texts.inputs
        numbers = {
            name: _numbers(self._model, name, _on_host(value), read[name])
            if name in read
            else value
            for name, value in inputs.items()
        }
        outputs = self._inner.execute(numbers, replica=replica)
        return {
            name: _written(_on_host(value)) if name in self._texts.outputs else value
            for name, value in outputs.items()
        }

    def expected_seconds(self, rows: int) -> float:
        """Return infinity, so that long texts are not parsed on the event loop."""
        return math.inf

    def padded_rows(self, rows: int) -> int:
        """Return `rows`: texts are not padded."""
        return rows


def _shown(spec: TensorSpec, is_text: bool) -> TensorSpec:
    return replace(spec, datatype=BYTES) if is_text else spec


def _on_host(value: Value) -> Tensor:
    return value if isinstance(value, np.ndarray) else value.numpy()


def _numbers(model: str, name: str, texts: Tensor, datatype: Datatype) -> Tensor:
    read = _integer if datatype.dtype.kind in "iu" else float
    found = []
    for text in texts.ravel():
        try:
            found.append(read(bytes(text)))
        except ValueError:
            shown = bytes(text)[:_SHOWN].decode(errors="replace")
            expected = f"strings that parse as {datatype.name}"
            raise InvalidTensor(model, "input", name, expected, f"'{shown}'") from None
    try:
        return np.array(found, datatype.dtype).reshape(texts.shape)
    except OverflowError:
        expected = f"strings that parse as {datatype.name}"
        raise InvalidTensor(model, "input", name, expected, "a larger one") from None


def _integer(text: bytes) -> int:
    # More digits do not fit any datatype, and Python takes long to parse them.
    if not _INTEGER.fullmatch(text) or len(text) > _SHOWN:
        raise ValueError
    return int(text)


def _written(numbers: Tensor) -> Tensor:
    form: Callable[[Any], str] = str
    if numbers.dtype.kind == "f":
        digits = _DIGITS[numbers.dtype.itemsize]
        form = lambda number: digits % number  # noqa: E731
    texts = np.empty(numbers.size, np.object_)
    texts[:] = [form(number).encode() for number in numbers.ravel().tolist()]
    return texts.reshape(numbers.shape)
