"""Validation of requests against their model."""

from collections.abc import Sequence
from typing import NoReturn

from xlaserve.errors import DuplicateTensor, InvalidTensor, MissingInputs, UnknownTensor
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving import parameters
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.serving.parameters import NamedParameters
from xlaserve.tensors import Tensor, TensorSpec, describe

_NO_CONFIG = ModelConfig()


class QuickCheck:
    """Recognizes ordinary requests quickly; all others take the general path, `check_inputs`."""

    def __init__(self, info: ModelInfo, config: ModelConfig = _NO_CONFIG) -> None:
        self._wanted = {spec.name: (spec.datatype, spec.shape[1:]) for spec in info.inputs}
        self._count = len(info.inputs)
        self._most_rows = info.max_batch_size
        if (
            info.has_sequences
            or not self._most_rows
            or any(-1 in spec.shape[1:] for spec in info.inputs)
        ):
            self._most_rows = 0  # so that no request counts as ordinary
        self.parameters = NamedParameters(parameters.obeyed_by(config, info), info)

    def inputs(self, request: InferRequest) -> tuple[dict[str, Tensor], int] | None:
        """Return the inputs by name and their rows; None if the request needs `check_inputs`."""
        tensors = request.inputs
        form = request.form
        if form is not None and form.accepted_by is self:
            return {tensor.name: tensor.data for tensor in tensors}, form.rows
        parameters = request.parameters
        is_plain = not parameters or self.parameters.are_ordinary(parameters)
        if request.outputs or len(tensors) != self._count or not is_plain:
            return None
        found: dict[str, Tensor] = {}
        rows = 0
        for tensor in tensors:
            name, data = tensor.name, tensor.data
            wanted = self._wanted.get(name)
            if wanted is None or tensor.parameters or tensor.datatype is not wanted[0]:
                return None
            shape = data.shape
            if shape[1:] != wanted[1] or not shape or (rows and shape[0] != rows):
                return None
            rows = shape[0]
            found[name] = data
        if not 1 <= rows <= self._most_rows or len(found) != self._count:
            return None
        if form is not None and not parameters:
            form.accepted_by, form.rows = self, rows
        return found, rows


def check_inputs(model: str, info: ModelInfo, request: InferRequest) -> None:
    """Raise an InvalidRequest unless the inputs are exactly those of the model.

    Refuses unknown, duplicate and missing inputs, wrong datatypes, shapes and row counts, and
    invalid parameters (V2 protocol, Inference Request; `parameters`).
    """
    parameters.check_request(request.parameters)
    specs = {spec.name: spec for spec in info.inputs}
    seen: set[str] = set()
    for tensor in request.inputs:
        spec = specs.get(tensor.name)
        if spec is None:
            raise UnknownTensor(model, "input", tensor.name, specs)
        if tensor.name in seen:
            raise DuplicateTensor(model, "input", tensor.name)
        seen.add(tensor.name)
        _check_input(model, spec, tensor)
    if len(seen) < len(specs):
        missing = [name for name in specs if name not in seen and name not in info.optional]
        if missing:
            optional = len(info.optional)
            raise MissingInputs(model, len(specs), len(seen), missing, optional=optional)
    if info.max_batch_size:
        _check_rows(model, info, request.inputs)


def _check_input(model: str, spec: TensorSpec, tensor: InferInput) -> None:
    if tensor.parameters:
        parameters.check_tensor(model, "input", spec.name, parameters.INPUT, tensor.parameters)
    if tensor.datatype is not spec.datatype or not spec.accepts(tensor.data.shape):
        _raise_invalid(model, spec, str(spec), tensor)


def _raise_invalid(model: str, spec: TensorSpec, expected: str, tensor: InferInput) -> NoReturn:
    got = describe(tensor.datatype, tensor.data.shape)
    raise InvalidTensor(model, "input", spec.name, expected, got)


def _check_rows(model: str, info: ModelInfo, inputs: Sequence[InferInput]) -> None:
    rows = inputs[0].data.shape[0] if inputs else 1
    specs = {spec.name: spec for spec in info.inputs}
    for tensor in inputs:
        have = tensor.data.shape[0]
        if not 1 <= have <= info.max_batch_size:
            expected = f"a batch of 1 to {info.max_batch_size} rows"
            _raise_invalid(model, specs[tensor.name], expected, tensor)
        if have != rows:
            expected = f"{rows} rows as in input '{inputs[0].name}'"
            _raise_invalid(model, specs[tensor.name], expected, tensor)


def check_outputs(
    model: str, info: ModelInfo, requested: Sequence[RequestedOutput]
) -> tuple[TensorSpec, ...]:
    """Return the outputs to send, in the order in which they were requested.

    Raises an InvalidRequest for an unknown or a repeated output.
    """
    if not requested:
        return info.outputs
    specs = {spec.name: spec for spec in info.outputs}
    chosen: dict[str, TensorSpec] = {}
    for output in requested:
        spec = specs.get(output.name)
        if spec is None:
            raise UnknownTensor(model, "output", output.name, specs)
        if output.name in chosen:
            raise DuplicateTensor(model, "output", output.name)
        if output.parameters:
            parameters.check_tensor(
                model, "output", spec.name, parameters.OUTPUT, output.parameters
            )
        chosen[output.name] = spec
    return tuple(chosen.values())
