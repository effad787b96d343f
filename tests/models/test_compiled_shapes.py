"""What a load compiles, and what is foreseen of it, are read from one text in one way."""

from types import MappingProxyType

import pytest
from jax import export
from jax.core import ShapedArray

from xlaserve.artifact import foreseen, shapes
from xlaserve.artifact.foreseen import Serving
from xlaserve.artifact.manifest import Durable, Manifest
from xlaserve.errors import InvalidModel
from xlaserve.model_config.compiled_shapes import parse
from xlaserve.model_config.config import ModelConfig
from xlaserve.tensors import DATATYPES, TensorSpec

S, T = export.symbolic_shape("s, t")
"""Open dimensions of two inputs."""


def compiled(text: str, names: int) -> int:
    """Return how many combinations a load compiles; 1 for those that it refuses."""
    avals = [ShapedArray((2, size), "float32") for size in (S, T)[:names]]
    specs = [TensorSpec(str(size), DATATYPES["FP32"], (2, -1)) for size in (S, T)[:names]]
    config = ModelConfig(parameters=MappingProxyType({"compiled_shapes": text}))
    try:
        return len(shapes.read(config, specs, avals).combinations)
    except InvalidModel:
        return 1


def told(text: str, names: int) -> int:
    """Return how many are foreseen."""
    inputs = tuple(TensorSpec(str(size), DATATYPES["FP32"], (2, -1)) for size in (S, T)[:names])
    arguments = tuple(f"float32[2, {size}]" for size in (S, T)[:names])
    durable = Durable(10, is_open=True, arguments=arguments, results=(), unused=())
    described = Manifest(inputs, (), 0, (), 0, {}, ("cpu",), "0.10", "", durable=durable)
    config = ModelConfig(parameters=MappingProxyType({"compiled_shapes": text}))
    return foreseen.programs(described, Serving(config=config)).count


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("8", 1, 1),
        ("8,16", 1, 2),
        (" 8 , 16 ", 1, 2),
        ('{"s": [8, 16, 32]}', 1, 3),
        (' {"s": [8, 16], "t": [4, 5, 6]}', 2, 6),
        # The load refuses these, and nothing is compiled for them.
        ("8,16", 2, 1),
        ("8,8", 1, 1),
        ("0,8", 1, 1),
        ("-8,8", 1, 1),
        ('{"s": [8, 8]}', 1, 1),
        ('{"s": ["8", "16"]}', 1, 1),
        ('{"s": []}', 1, 1),
        ("8;16", 1, 1),
        ("", 1, 1),
    ],
)
def test_a_load_compiles_what_is_foreseen(text: str, names: int, expected: int) -> None:
    """It reserves memory for as many programs as there will be."""
    assert (expected, expected) == (compiled(text, names), told(text, names))


def test_a_name_is_no_part_of_the_text() -> None:
    """Files of others may call a dimension what they like."""
    assert {'a":[1],"b': (2, 3)} == parse("2,3", ['a":[1],"b'])
