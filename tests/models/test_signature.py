from dataclasses import replace

import pytest

from xlaserve.artifact.signature import Signature, agreed, from_config
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.tensors import DATATYPES, Shape, TensorSpec

FP32 = DATATYPES["FP32"]
INT64 = DATATYPES["INT64"]
BATCHED = Signature(
    (TensorSpec("x", FP32, (-1, 4)), TensorSpec("n", INT64, (-1,))),
    (TensorSpec("y", FP32, (-1, 2)),),
    8,
)
FIXED = Signature((TensorSpec("x", FP32, (3, 4)),), (TensorSpec("y", FP32, ()),), 0)


def _input(dims: Shape, name: str = "x", datatype: str = "FP32") -> tuple[ConfigTensor, ...]:
    return (ConfigTensor(name, DATATYPES[datatype], dims),)


@pytest.mark.parametrize("signature", [BATCHED, FIXED])
def test_empty_configuration_leaves_the_artifact_as_it_is(signature: Signature) -> None:
    assert signature == agreed(signature, ModelConfig())


def test_configured_batch_size_replaces_the_exported_one() -> None:
    assert 32 == agreed(BATCHED, ModelConfig(max_batch_size=32)).max_batch_size


@pytest.mark.parametrize(
    ("max_batch_size", "dims"),
    [(8, (4,)), (8, (-1,)), (0, (4,)), (0, (-1, 4)), (0, (-1, -1))],
)
def test_dims_with_or_without_batch_agree(max_batch_size: int, dims: Shape) -> None:
    """With max_batch_size, dims omit the batch; without it, they may omit or include it."""
    inputs = (*_input(dims), *_input((), "n", "INT64"))
    config = ModelConfig(max_batch_size=max_batch_size, inputs=inputs)

    assert BATCHED == agreed(BATCHED, config)


def test_dims_of_fixed_shapes_are_the_whole_shape() -> None:
    assert FIXED == agreed(FIXED, ModelConfig(inputs=_input((3, 4))))


def test_order_of_the_configuration_does_not_matter() -> None:
    inputs = (*_input((), "n", "INT64"), *_input((4,)))

    assert BATCHED == agreed(BATCHED, ModelConfig(max_batch_size=8, inputs=inputs))


@pytest.mark.parametrize(
    ("signature", "config", "expected"),
    [
        (
            BATCHED,
            ModelConfig(max_batch_size=8, inputs=_input((5,))),
            "input 'x': expected FP32[-1,4] as in the artifact, "
            "got FP32[-1,5] from the configuration",
        ),
        (
            BATCHED,
            ModelConfig(max_batch_size=8, inputs=_input((-1, 4))),
            "input 'x': expected FP32[-1,4] as in the artifact, "
            "got FP32[-1,-1,4] from the configuration",
        ),
        (
            BATCHED,
            ModelConfig(inputs=_input((4,), datatype="FP64")),
            "input 'x': expected FP32[-1,4] as in the artifact, "
            "got FP64[-1,4] from the configuration",
        ),
        (
            BATCHED,
            ModelConfig(max_batch_size=8, outputs=_input((3,), "y")),
            "output 'y': expected FP32[-1,2] as in the artifact, "
            "got FP32[-1,3] from the configuration",
        ),
        (
            BATCHED,
            ModelConfig(inputs=_input((4,), "image")),
            "input 'image' is not in the artifact, which has 'x', 'n'",
        ),
        (
            BATCHED,
            ModelConfig(inputs=_input((4,))),
            "the configuration lists 1 inputs, expected none or the 2 of the artifact; missing:"
            " 'n'",
        ),
        (
            replace(BATCHED, outputs=(*BATCHED.outputs, TensorSpec("z", FP32, (-1,)))),
            ModelConfig(outputs=_input((2,), "y")),
            "the configuration lists 1 outputs, expected none or the 2 of the artifact; missing:"
            " 'z'",
        ),
        (
            BATCHED,
            ModelConfig(inputs=_input((4,)) * 2),
            "the configuration has input 'x' twice",
        ),
        (
            BATCHED,
            ModelConfig(inputs=_input((4,), "")),
            "the configuration has an input without a name",
        ),
        (
            BATCHED,
            ModelConfig(max_batch_size=70000),
            "max_batch_size: expected 0 to 65536, got 70000 from the configuration",
        ),
        (
            FIXED,
            ModelConfig(max_batch_size=8),
            "the configuration has max_batch_size 8, but the artifact has fixed shapes "
            "and no batch dimension",
        ),
        (
            FIXED,
            ModelConfig(inputs=_input((4,))),
            "input 'x': expected FP32[3,4] as in the artifact, got FP32[4] from the configuration",
        ),
    ],
)
def test_disagreement_names_tensor_expected_and_got(
    signature: Signature, config: ModelConfig, expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        agreed(signature, config)
    assert expected == str(caught.value)


def test_configuration_alone_describes_a_model() -> None:
    config = ModelConfig(
        max_batch_size=8,
        inputs=(*_input((4,)), *_input((), "n", "INT64")),
        outputs=_input((2,), "y"),
    )

    assert BATCHED == from_config(config)


def test_configuration_without_a_batch_has_whole_shapes() -> None:
    config = ModelConfig(inputs=_input((3, 4)), outputs=_input((), "y"))

    assert FIXED == from_config(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(), "the configuration must have at least one input"),
        (ModelConfig(inputs=_input((4,))), "the configuration must have at least one output"),
        (ModelConfig(max_batch_size=-1), "max_batch_size: expected 0 to 65536, got -1"),
    ],
)
def test_configuration_alone_must_be_complete(config: ModelConfig, expected: str) -> None:
    with pytest.raises(InvalidModel, match=expected):
        from_config(config)
