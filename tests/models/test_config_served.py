"""The configuration of a loaded model, with what was not written filled in."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json
from xlaserve.row_proofs.verdict import Independence, Verdict
from xlaserve.runtime.config_served import ServedConfig
from xlaserve.runtime.loaded import LoadedModel, ModelInfo
from xlaserve.tensors import DATATYPES, TensorSpec
from xlaserve_proto import inference

FP32, BF16 = DATATYPES["FP32"], DATATYPES["BF16"]
INFO = ModelInfo(
    "jax_export",
    (TensorSpec("x", FP32, (-1, 4)), TensorSpec("z", FP32, (-1, -1))),
    (TensorSpec("y", BF16, (-1, 2)),),
    max_batch_size=8,
)


def served(text: str, info: ModelInfo = INFO) -> inference.ModelConfig:
    return ServedConfig("m", parse_json(text), info).message()


def tensors(message: inference.ModelConfig) -> list[tuple[str, Any, list[int]]]:
    inputs = [(tensor.name, tensor.data_type, tensor.dims) for tensor in message.input]
    return inputs + [(tensor.name, tensor.data_type, tensor.dims) for tensor in message.output]


WHOLE = [
    ("x", inference.DataType.TYPE_FP32, [4]),
    ("z", inference.DataType.TYPE_FP32, [-1]),
    ("y", inference.DataType.TYPE_BF16, [2]),
]


def test_a_model_without_a_configuration_has_a_whole_one() -> None:
    message = ServedConfig("m", ModelConfig(), INFO).message()

    assert ("m", "jax_export", "jax_export", 8) == (
        message.name,
        message.platform,
        message.backend,
        message.max_batch_size,
    )
    assert 1 == message.version_policy.latest.num_versions
    assert WHOLE == tensors(message)


def test_what_was_written_stays() -> None:
    """Including fields that the server ignores."""
    message = served(
        '{"platform": "jax_export", "version_policy": {"all": {}}, "metric_tags": {"a": "b"},'
        '"parameters": {"p": {"string_value": "q"}}, "response_cache": {"enable": true},'
        '"input": [{"name": "z", "data_type": "TYPE_FP32", "dims": [-1], "format": "FORMAT_NHWC"}]}'
    )

    assert {"a": "b"} == message.metric_tags
    assert "q" == message.parameters["p"].string_value
    assert message.response_cache.enable
    assert "jax_export" == message.backend
    assert message.version_policy == inference.ModelVersionPolicy(
        all=inference.ModelVersionPolicyAll()
    )
    assert ["FORMAT_NONE", "FORMAT_NHWC"] == [tensor.format.name for tensor in message.input]
    assert WHOLE == tensors(message)


def test_a_batch_dimension_in_the_dims_moves_to_the_batch_size() -> None:
    """Without max_batch_size a configuration may be written either way."""
    message = served('{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4]}]}')

    assert WHOLE == tensors(message)


def test_a_model_without_batches_has_all_its_dimensions() -> None:
    info = ModelInfo("jax_export", (TensorSpec("x", FP32, (3, -1)),), (), max_batch_size=0)
    message = served("{}", info)

    assert (0, [3, -1]) == (message.max_batch_size, message.input[0].dims)


def test_an_ensemble_has_a_platform_and_no_backend() -> None:
    """A configuration with both would be refused when it is sent back."""
    info = ModelInfo("ensemble", INFO.inputs, INFO.outputs, max_batch_size=8)
    message = served("{}", info)

    assert ("ensemble", "") == (message.platform, message.backend)


def test_what_was_written_is_not_changed() -> None:
    config = parse_json('{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1, 4]}]}')
    before = bytes(config.message or inference.ModelConfig())
    ServedConfig("m", config, INFO).message()

    assert config.message is not None
    assert before == bytes(config.message)


@pytest.mark.parametrize("dims", [[4], [-1, 4]])
def test_it_loads_the_same_model_again(load: Any, affine_directory: Path, dims: list[int]) -> None:
    """A client may send the reported configuration back as the `config` of a load."""
    text = f'{{"input": [{{"name": "x", "data_type": "TYPE_FP32", "dims": {dims}}}]}}'
    first: LoadedModel = load(affine_directory, parse_json(text))
    message = ServedConfig("m", parse_json(text), first.info).message()
    again = load(affine_directory, parse_json(message.to_json()))

    assert first.info.inputs == again.info.inputs
    assert first.info.outputs == again.info.outputs
    assert first.info.max_batch_size == again.info.max_batch_size


def test_what_is_proved_of_rows_is_shown() -> None:
    """As a parameter, beside those that were written; a claim that was written is replaced."""
    verdict = Verdict(Independence.MIXED, "y", "stablehlo.sort", "sorts the rows", "model.py:7")
    info = dataclasses.replace(INFO, verdict=verdict)
    message = served(
        '{"parameters": {"p": {"string_value": "q"}, "batch_rows": {"string_value": "proved"}}}',
        info,
    )

    assert {
        "p": "q",
        "batch_rows": "mixed: stablehlo.sort sorts the rows (model.py:7), in output 'y'",
    } == {name: value.string_value for name, value in message.parameters.items()}
    assert "batch_rows" not in served("{}").parameters
