"""Wraps a model whose inputs or outputs are numbers as text."""

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
"""Forms of floating-point numbers by their bytes, as onnxruntime writes them."""


def with_numbers(config: ModelConfig, texts: Texts, described: Manifest) -> ModelConfig:
    """Return a configuration in which what clients see as text is the number that the graph has.

    Raises InvalidModel for a tensor that it has as a number, and the model as text.
    """
    names = texts.inputs.keys() | texts.outputs
    numbers = {spec.name: spec.datatype for spec in (*described.inputs, *described.outputs)}

    def of(tensor: ConfigTensor) -> ConfigTensor:
        if tensor.name not in names:
            return tensor
        if tensor.datatype is not BYTES:
            raise InvalidModel(
                f"tensor '{tensor.name}': expected BYTES as the model has it, got "
                f"{tensor.datatype.name} from the configuration"
            )
        return replace(tensor, datatype=numbers[tensor.name])

    return replace(
        config, inputs=tuple(map(of, config.inputs)), outputs=tuple(map(of, config.outputs))
    )


class TextModel(AroundModel):
    """Reads and writes the texts of a model, on the host and in a thread.

    No request is put together with another: a text that is no number fails its own request alone.
    """

    on_demand = None
    dispatching = None
    batch_limit = 0

    def __init__(self, model: str, inner: LoadedModel, texts: Texts) -> None:
        if inner.on_demand is not None:
            raise InvalidModel("texts are served with a max_batch_size only")
        for name in inner.info.optional:
            if name in texts.inputs:
                raise InvalidModel(f"input '{name}' is optional, and is of texts: expected numbers")
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
        """Run once; raises InvalidTensor for a text that is no number."""
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
        """Return infinity: texts may be long, and the event loop does not read them."""
        return math.inf

    def padded_rows(self, rows: int) -> int:
        """Return the rows as they are."""
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
            expected = f"texts that are numbers of {datatype.name}"
            raise InvalidTensor(model, "input", name, expected, f"'{shown}'") from None
    try:
        return np.array(found, datatype.dtype).reshape(texts.shape)
    except OverflowError:
        expected = f"texts that are numbers of {datatype.name}"
        raise InvalidTensor(model, "input", name, expected, "a larger one") from None


def _integer(text: bytes) -> int:
    # What a decimal of more digits is, no datatype can hold; Python would take long to read it.
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
