"""Memory of a compiled program: on the CPU, and with a TPU's tiled layouts."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from xlaserve.runtime.programs.footprint import Footprint, padded


def _compiled(function: Any, parameters: list[tuple[int, ...]], *inputs: tuple[int, ...]) -> Any:
    def abstract(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(np.float32))

    given = [abstract(shape) for shape in parameters], [abstract(shape) for shape in inputs]
    return jax.jit(function).lower(*given).compile()


def test_parameters_inputs_and_outputs_are_told_apart() -> None:
    executable = _compiled(lambda p, x: [x[0] @ p[0]], [(4, 300)], (2, 4))
    found = Footprint.of(executable)

    assert (4 * 4 * 300, 0) == (found.parameters_bytes, found.padding_bytes)
    assert 4 * (4 * 300 + 2 * 4) == found.arguments_bytes
    assert 4 * 2 * 300 == found.outputs_bytes
    assert 4 * (2 * 4 + 2 * 300) + found.temporaries_bytes == found.scratch_bytes


def test_a_parameter_that_is_not_used_hides_no_scratch_memory() -> None:
    """An unused parameter is not an argument, so inputs and outputs stay the same."""
    used = _compiled(lambda p, x: [x[0] + p[0]], [(1, 8)], (3, 8))
    unused = _compiled(lambda p, x: [x[0] + p[0]], [(1, 8), (1000, 1000)], (3, 8))

    assert Footprint.of(used) == Footprint.of(unused)
    assert 4 * 2 * 3 * 8 <= Footprint.of(unused).scratch_bytes


@dataclass
class _Layout:
    major_to_minor: tuple[int, ...]
    tiling: tuple[tuple[int, ...], ...] | None = None
    sub_byte_element_size_in_bits: int = 0


@pytest.mark.parametrize(
    ("layout", "shape", "expected"),
    [
        (_Layout((0, 1)), (3, 5), (3, 5)),
        (_Layout((0, 1), ()), (3, 5), (3, 5)),
        (_Layout((0, 1), ((8, 128),)), (9, 128), (16, 128)),
        (_Layout((1, 0), ((8, 128),)), (9, 128), (128, 128)),
        (_Layout((0, 3, 1, 2), ((8, 128),)), (32, 56, 56, 3), (32, 3, 56, 128)),
        (_Layout((0, 1), ((8, 128), (2, 1))), (3, 5), (8, 128)),
        (_Layout((0,), ((1024,),)), (1025,), (2048,)),
        (_Layout((0,), ((8, 128),)), (5,), (8, 128)),
        (_Layout(()), (), ()),
    ],
)
def test_sizes_are_rounded_up_to_whole_tiles(
    layout: _Layout, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert expected == padded(layout, shape)


def test_a_parameter_in_tiles_is_larger_than_its_array() -> None:
    """A TPU pads 9 x 128 elements to 16 x 128; an unused parameter is not an argument."""
    program = _Said(_Analysis(argument_size_in_bytes=4 * 16 * 128 + 100))
    sharding = SimpleNamespace(shard_shape=lambda shape: shape)
    tiled = SimpleNamespace(layout=_Layout((0, 1), ((8, 128),)), sharding=sharding)
    unused = SimpleNamespace(layout=None, sharding=None)
    array = SimpleNamespace(shape=(9, 128), dtype=np.dtype(np.float32))
    program.input_formats = (([tiled, unused], []), {})
    program.args_info = (([array, array], []), {})
    found = Footprint.of(program)

    assert (4 * 16 * 128, 4 * 7 * 128) == (found.parameters_bytes, found.padding_bytes)
    assert 100 == found.scratch_bytes


class _Said:
    """A program with the given memory analysis, parameters and inputs."""

    def __init__(self, analysis: Any, serialized: bytes | None = None) -> None:
        self._analysis, self._serialized = analysis, serialized
        self.input_formats: Any = (([], []), {})
        self.args_info: Any = (([], []), {})

    def memory_analysis(self) -> Any:
        return self._analysis

    def runtime_executable(self) -> Any:
        return self

    def serialize(self) -> bytes:
        if self._serialized is None:
            raise RuntimeError("not this one")
        return self._serialized


@dataclass
class _Analysis:
    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0
    temp_size_in_bytes: int = 0
    generated_code_size_in_bytes: int = 0
    total_allocation_bytes: int = 0


def test_what_is_allocated_besides_is_constants() -> None:
    analysis = _Analysis(10, 20, 5, 30, 0, 63)

    assert 8 == Footprint.of(_Said(analysis)).constants_bytes
    assert 55 == Footprint.of(_Said(analysis)).scratch_bytes


@pytest.mark.parametrize(
    ("said", "serialized", "accelerated", "expected"),
    [
        (7, b"abc", True, 7),
        (0, b"abc", True, 3),
        (-1, b"abc", True, 3),
        (0, None, True, 0),
        (0, b"abc", False, 0),
    ],
)
def test_code_of_which_nothing_is_said_is_as_large_as_what_is_stored_of_it(
    said: int, serialized: bytes | None, accelerated: bool, expected: int
) -> None:
    program = _Said(_Analysis(generated_code_size_in_bytes=said), serialized)

    assert expected == Footprint.of(program, accelerated=accelerated).code_bytes


def test_a_compiler_that_says_nothing_leaves_zeros() -> None:
    assert Footprint() == Footprint.of(_Said(None), accelerated=True)
