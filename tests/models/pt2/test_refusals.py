"""A program's sizes, datatypes and memory layout are respected, or it is refused."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.pt2_models import Json, changed, path, read

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2 import importing
from xlaserve.importers.pt2.aliasing import Reference
from xlaserve.importers.pt2.guards import holds
from xlaserve.importers.pt2.importing import Options
from xlaserve.importers.pt2.inputs import resolve
from xlaserve.importers.pt2.values import common_dtype


def _graph(tree: Json) -> Json:
    graph: Json = tree["graph_module"]["graph"]
    return graph


def _ranges(least: int) -> Callable[[Json], object]:
    def change(tree: Json) -> None:
        (symbol,) = tree["range_constraints"]
        tree["range_constraints"][symbol] = {"min_val": least, "max_val": 8}

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.update(guards_code=["L['input'].size()[0] % 2 == 0"]), "the program requires"),
        (lambda t: t.update(guards_code=["__import__('os')"]), "cannot be read"),
        (_ranges(3), "batches of 3 and more"),
    ],
)
def test_sizes_that_were_not_exported_for_are_refused(
    change: Callable[[Json], object], text: str
) -> None:
    program = read(changed("mlp", change)).program

    with pytest.raises(InvalidModel, match=text):
        resolve(program, {}, None)


def test_a_least_batch_of_2_is_how_pytorch_calls_any() -> None:
    assert 8 == resolve(read(changed("mlp", _ranges(2))).program, {}, None).max_batch_size


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("((16*L['x'].size()[0]) % L['y'].size()[0]) == 0", True),
        ("L['x'].size()[0] == L['y'].size()[1]", False),
        ("not L['x'].size()[0] > 3 or 2 <= L['y'].size()[1] < 9", True),
        ("L['x'].size()[0] // 0 == 1", False),
    ],
)
def test_a_guard_is_read(guard: str, *, expected: bool) -> None:
    assert expected is holds(guard, {"x": (4, 3), "y": (4, 5)})


def _run(data: bytes, limit_bytes: int = 2**30) -> None:
    found = read(data)
    made = importing.exportable(
        found, resolve(found.program, {}, 2), Options(limit_bytes=limit_bytes)
    )
    jax.eval_shape(made.fn, made.params, jax.ShapeDtypeStruct((2, 4), np.float32))


def _described(**fields: object) -> Callable[[Json], object]:
    return lambda tree: _graph(tree)["tensor_values"]["tanh"].update(fields)


@pytest.mark.parametrize(
    "change",
    [_described(dtype=8), _described(sizes=[{"as_int": 2}]), _described(sizes=[{"as_int": 9}] * 2)],
)
def test_a_result_that_pytorch_saw_otherwise_is_refused(change: Callable[[Json], object]) -> None:
    with pytest.raises(InvalidModel, match=r"node 'tanh' .* here, but .* in PyTorch"):
        _run(changed("mlp", change))


def test_a_result_above_the_limit_is_refused() -> None:
    with pytest.raises(InvalidModel, match="node 'linear' .* 128 bytes, more than the 100 allowed"):
        _run(path("mlp").read_bytes(), 100)


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ((jnp.ones(2, jnp.float16), jnp.float32(1)), np.float16),
        ((jnp.ones(2, jnp.int8), jnp.float32(1)), np.float32),
        ((jnp.ones(2, jnp.int8), 2), np.int8),
        ((jnp.ones(2, jnp.int8), 2.5), np.float32),
        ((jnp.ones(2, np.bool_), 2), np.int64),
        ((jnp.ones(2, jnp.float16), jnp.ones(2, jnp.bfloat16)), np.float32),
    ],
)
def test_mixed_datatypes_give_what_pytorch_has(
    operands: tuple[jax.Array, jax.Array], expected: type[np.generic]
) -> None:
    assert np.dtype(expected) == common_dtype(*operands)


def test_a_tensor_of_the_module_cannot_be_changed() -> None:
    with pytest.raises(InvalidModel, match="changes buffer 'count' in place"):
        Reference.fresh(jnp.zeros(2), "buffer 'count'").write(jnp.ones(2), "node")


def test_what_may_share_memory_is_not_read_after_a_change() -> None:
    """PyTorch decides by strides whether a reshape is a view."""
    source = Reference.fresh(jnp.zeros(2))
    copy = source.copy(jnp.zeros((1, 2)))
    copy.write(jnp.ones((1, 2)), "node 'relu_'")

    np.testing.assert_array_equal(1, copy.read())
    with pytest.raises(InvalidModel, match="may alias one that node 'relu_' changes"):
        source.read()
