"""The warm-up requests of a model (ModelWarmup)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import betterproto

from xlaserve.model_config.schema import BadConfig, shown
from xlaserve.tensors import BY_CONFIG_NAME, Datatype, Shape
from xlaserve_proto import inference

MOST_COUNT = 10_000
"""Maximum repetitions of a sample, so that a load terminates."""


class SampleData(Enum):
    """How the elements of a sample's input are generated."""

    ZERO = auto()
    RANDOM = auto()
    FILE = auto()


@dataclass(frozen=True, slots=True)
class SampleInput:
    """An input of a sample."""

    datatype: Datatype
    dims: Shape
    """Dimensions without the batch dimension."""
    data: SampleData
    file: str = ""
    """File name in the model's directory `warmup`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request executed before the model is ready."""

    name: str
    batch_size: int
    """Rows of the request; 1 if the model has no batch dimension."""
    count: int
    inputs: Mapping[str, SampleInput]


def samples_of(message: inference.ModelConfig) -> tuple[Sample, ...]:
    """Read the samples of a configuration message. Raises BadConfig."""
    return tuple(
        _sample(f"model_warmup[{index}]", sample, message.max_batch_size)
        for index, sample in enumerate(message.model_warmup)
    )


def _sample(place: str, sample: inference.ModelWarmup, max_batch_size: int) -> Sample:
    if sample.batch_size > max(1, max_batch_size or sample.batch_size):
        expected = f"1 to {max_batch_size} (max_batch_size)"
        raise _unfit(f"{place}.batch_size", expected, sample.batch_size)
    if sample.count > MOST_COUNT:
        raise _unfit(f"{place}.count", f"at most {MOST_COUNT}", sample.count)
    if not sample.inputs:
        raise _unfit(f"{place}.inputs", "the inputs of the model", "none")
    inputs = {
        name: _input(f"{place}.inputs[{shown(name)}]", given)
        for name, given in sample.inputs.items()
    }
    return Sample(sample.name, sample.batch_size or 1, sample.count or 1, inputs)


def _input(place: str, given: inference.ModelWarmupInput) -> SampleInput:
    datatype = BY_CONFIG_NAME.get(given.data_type.name or "")
    if datatype is None:
        raise _unfit(f"{place}.data_type", f"one of {', '.join(BY_CONFIG_NAME)}", "none")
    _check_dims(place, given.dims)
    match betterproto.which_one_of(given, "input_data_type"):
        case ("zero_data", True):
            return SampleInput(datatype, tuple(given.dims), SampleData.ZERO)
        case ("random_data", True):
            return SampleInput(datatype, tuple(given.dims), SampleData.RANDOM)
        case ("input_data_file", str(file)):
            if not file or "/" in file or "\\" in file or "\0" in file or file.startswith("."):
                raise _unfit(f"{place}.input_data_file", "the name of a file", shown(file))
            return SampleInput(datatype, tuple(given.dims), SampleData.FILE, file)
    expected = "zero_data true, random_data true, or an input_data_file"
    raise _unfit(place, expected, "neither")


def _check_dims(place: str, dims: Sequence[int]) -> None:
    for index, size in enumerate(dims):
        if size < 1:
            raise _unfit(f"{place}.dims[{index}]", "a size above 0", size)


def _unfit(place: str, expected: str, got: object) -> BadConfig:
    return BadConfig.mismatch(expected, str(got)).within(place)
