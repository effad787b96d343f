from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.model_config.fields import EXECUTE_DELAY
from xlaserve.runtime.identity import IdentityModel
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.tensors import DATATYPES, Shape, TensorSpec

Load = Callable[[Path, ModelConfig], LoadedModel]


def _tensor(name: str, datatype: str = "FP32", dims: Shape = (-1,)) -> ConfigTensor:
    return ConfigTensor(name, DATATYPES[datatype], dims)


def _config(
    inputs: tuple[ConfigTensor, ...], outputs: tuple[ConfigTensor, ...], max_batch_size: int = 0
) -> ModelConfig:
    return ModelConfig(
        backend="identity", max_batch_size=max_batch_size, inputs=inputs, outputs=outputs
    )


def test_each_output_is_the_input_at_its_place(tmp_path: Path, load: Load) -> None:
    inputs = (_tensor("a"), _tensor("b", "BYTES"))
    outputs = (_tensor("x"), _tensor("y", "BYTES"))
    numbers, texts = np.arange(3, dtype=np.float32), np.array([b"\xff", b""], object)

    model = load(tmp_path, _config(inputs, outputs))

    assert {"x": numbers, "y": texts} == model.execute({"b": texts, "a": numbers})


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype_passes(tmp_path: Path, load: Load, datatype: str) -> None:
    config = _config((_tensor("x", datatype, (2, 2)),), (_tensor("y", datatype, (2, 2)),))
    tensor = np.zeros((2, 2), DATATYPES[datatype].dtype)

    assert load(tmp_path, config).execute({"x": tensor})["y"] is tensor


def test_it_is_described_by_its_configuration(tmp_path: Path, load: Load) -> None:
    config = _config((_tensor("x", dims=(16,)),), (_tensor("y", dims=(16,)),), 64)

    info = load(tmp_path, config).info

    assert ("identity", 64) == (info.platform, info.max_batch_size)
    assert (TensorSpec("x", DATATYPES["FP32"], (-1, 16)),) == info.inputs
    assert 0 == info.memory.total_bytes


class _OnDevice:
    rows = 1
    shape = (1,)

    def numpy(self) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
        return np.ones(1, np.float32)


def test_tensor_on_a_device_stays_there_only_if_asked_to(tmp_path: Path, load: Load) -> None:
    model = load(tmp_path, _config((_tensor("x"),), (_tensor("y"),)))
    tensor = _OnDevice()

    assert tensor is model.execute({"x": tensor}, resident=True)["y"]
    assert isinstance(model.execute({"x": tensor})["y"], np.ndarray)


def test_there_is_nothing_to_compute(tmp_path: Path, load: Load) -> None:
    assert 0 == load(tmp_path, _config((_tensor("x"),), (_tensor("y"),))).expected_seconds(1)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ((), "the configuration must have at least one output"),
        (
            (_tensor("y"), _tensor("z")),
            "an identity model has as many outputs as inputs, got 1 inputs and 2 outputs",
        ),
        (
            (_tensor("y", "FP64"),),
            "output 'y': expected FP32[-1] like its input 'x', got FP64[-1]",
        ),
        (
            (_tensor("y", dims=(4,)),),
            "output 'y': expected FP32[-1] like its input 'x', got FP32[4]",
        ),
    ],
)
def test_outputs_that_are_not_the_inputs_are_refused(
    tmp_path: Path, load: Load, outputs: tuple[ConfigTensor, ...], expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        load(tmp_path, _config((_tensor("x"),), outputs))
    assert expected == str(caught.value)


def test_an_execution_takes_as_long_as_it_is_told(tmp_path: Path, load: Load) -> None:
    config = replace(_config((_tensor("x"),), (_tensor("y"),), 4), parameters={EXECUTE_DELAY: "25"})
    model = load(tmp_path, config)
    slept: list[float] = []
    told = IdentityModel(model.info, delay_seconds=0.025, sleep=slept.append)
    told.execute({"x": np.zeros((1, 1), np.float32)})

    assert 0.025 == model.expected_seconds(1)
    assert 4 == model.batch_limit
    assert [0.025] == slept


@pytest.mark.parametrize("text", ["-1", "1.5", "600001", "9" * 30, "soon"])
def test_a_delay_that_is_none_is_refused(tmp_path: Path, load: Load, text: str) -> None:
    config = replace(_config((_tensor("x"),), (_tensor("y"),)), parameters={EXECUTE_DELAY: text})
    with pytest.raises(InvalidModel, match="'execute_delay_ms': expected 0 to 600000 milliseconds"):
        load(tmp_path, config)
