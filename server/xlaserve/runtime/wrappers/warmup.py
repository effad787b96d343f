"""Executes the samples of `model_warmup` before a model becomes ready."""

import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from xlaserve.errors import InvalidModel, LoadCancelled, XlaserveError
from xlaserve.files.files import opened, read_exactly
from xlaserve.model_config.warmup import Sample, SampleData, SampleInput
from xlaserve.runtime.handling import Handling, UnsentRequest
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import Generating, LoadedModel, ModelInfo
from xlaserve.runtime.wrappers.optional_inputs import completed
from xlaserve.tensors import (
    BYTES,
    Datatype,
    Kind,
    Shape,
    Tensor,
    TensorDataError,
    TensorSpec,
    describe,
    from_bytes,
)

DIRECTORY = "warmup"
"""Directory of sample data, next to the version directories."""

MOST_BYTES = 64 << 20
"""Maximum size of one input of a sample."""

_POLL_SECONDS = 0.1
"""Interval in seconds at which a load that waits for a model's code checks for cancellation."""

_ELEMENT_BYTES = 16
"""Assumed size of a BYTES element, whose actual size is not known in advance."""


def run(model: LoadedModel, path: Path, context: LoadContext) -> None:
    """Execute the samples, on every replica. Blocks.

    Raises InvalidModel if a sample does not match the model's inputs; if a file is missing, outside
    of the model repository or of the wrong size; or if an execution fails.
    """
    for index, sample in enumerate(context.config.warmup):
        place = f"model_warmup[{index}]" + (f" ('{sample.name[:80]}')" if sample.name else "")
        inputs = _inputs(place, sample, model.info, path, context)
        for replica in range(model.replicas):
            for _ in range(sample.count):
                context.check_cancelled()
                try:
                    _execute(model, inputs, sample.batch_size, replica, context)
                except LoadCancelled:
                    raise
                except XlaserveError as error:
                    raise InvalidModel(f"{place} failed: {error}") from error
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                    raise InvalidModel(f"{place} failed: {problem[:500]}") from error


# --- the inputs of a sample ---


def _inputs(
    place: str, sample: Sample, info: ModelInfo, path: Path, context: LoadContext
) -> dict[str, Tensor]:
    specs = {spec.name: spec for spec in info.inputs}
    required = specs.keys() - info.optional.keys()
    if not required <= sample.inputs.keys() <= specs.keys():
        raise InvalidModel(
            f"{place}: expected the inputs {', '.join(specs)}, got {', '.join(sample.inputs)}"
        )
    if sample.batch_size > max(1, info.max_batch_size):
        raise InvalidModel(
            f"{place}: expected a batch_size of 1 to {max(1, info.max_batch_size)}, "
            f"got {sample.batch_size}"
        )
    inputs = {}
    for name, given in sample.inputs.items():
        at = f"{place} input '{name}'"
        one = _one(at, given, specs[name], path, context, is_batched=bool(info.max_batch_size))
        inputs[name] = np.repeat(one, sample.batch_size, axis=0) if info.max_batch_size else one
    rows = sample.batch_size if info.max_batch_size else 0
    return completed(inputs, info.inputs, info.optional, rows)


def _one(
    at: str,
    given: SampleInput,
    spec: TensorSpec,
    path: Path,
    context: LoadContext,
    *,
    is_batched: bool,
) -> Tensor:
    shape = (1, *given.dims) if is_batched else given.dims
    if given.datatype is not spec.datatype or not spec.accepts(shape):
        raise InvalidModel(f"{at}: expected {spec}, got {describe(given.datatype, shape)}")
    size = prod(shape) * (given.datatype.itemsize or _ELEMENT_BYTES)
    if size > MOST_BYTES:
        raise InvalidModel(f"{at}: expected at most {MOST_BYTES} bytes, got {size}")
    if given.data is SampleData.FILE:
        return _from_file(at, given, shape, path, context)
    if given.data is SampleData.RANDOM:
        return _random(given.datatype, shape)
    return np.full(shape, b"", object) if given.datatype is BYTES else _zeros(given.datatype, shape)


def _zeros(datatype: Datatype, shape: Shape) -> Tensor:
    return np.zeros(shape, datatype.dtype)


def _random(datatype: Datatype, shape: Shape) -> Tensor:
    """Return random elements from a fixed seed, so that a load is reproducible."""
    random = np.random.default_rng(0)
    if datatype is BYTES:
        return np.array([random.bytes(8) for _ in range(prod(shape))], object).reshape(shape)
    if datatype.kind is not Kind.FLOAT:
        return random.integers(0, 2, shape).astype(datatype.dtype)
    return random.random(shape).astype(datatype.dtype)


def _from_file(
    at: str, given: SampleInput, shape: Shape, path: Path, context: LoadContext
) -> Tensor:
    limit = MOST_BYTES if given.datatype is BYTES else prod(shape) * given.datatype.itemsize
    name = f"{DIRECTORY}/{given.file}"
    with opened(path.parent, name, limit_bytes=limit, roots=context.roots) as (file, size):
        data = read_exactly(file, size, name)
    try:
        return from_bytes(given.datatype, shape, data)
    except TensorDataError as error:
        raise InvalidModel(f"{at}: {name}: {error}") from error


# --- executions ---


def _execute(
    model: LoadedModel,
    inputs: Mapping[str, Tensor],
    rows: int,
    replica: int,
    context: LoadContext,
) -> None:
    if isinstance(model, Handling):
        errors: list[BaseException] = []
        outputs = [spec.name for spec in model.info.outputs]
        request = UnsentRequest(inputs, outputs, rows=rows, failed=errors.append)
        freed = threading.Event()
        model.handle(replica, [request], freed.set)
        while not freed.wait(_POLL_SECONDS):
            context.check_cancelled()
        for error in errors:
            raise error
        return
    if isinstance(model, Generating):
        answers = model.generate(inputs, {}, replica=replica)
        try:
            next(answers)
        except StopIteration:
            pass
        finally:
            answers.close()
        return
    on_demand = model.on_demand
    shape = on_demand.shape_of(inputs) if on_demand is not None else None
    if on_demand is not None and shape is not None:
        found = on_demand.find(shape) or on_demand.compile(shape)
        found.execute(inputs, replica=replica)
        return
    model.execute(inputs, replica=replica)
