"""`jax.export` files, parsed without JAX."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.export import Exported

from xlaserve.artifact import wrapper
from xlaserve.artifact.computation import of_artifact
from xlaserve.errors import InvalidModel

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "int4"),
)
DATA = Path(__file__).parents[1] / "data" / "old_models"


def _shapes(*texts: str, dtype: str = "float32") -> list[jax.ShapeDtypeStruct]:
    scope = jax.export.SymbolicScope()
    shapes = [jax.export.symbolic_shape(text, scope=scope) for text in texts]
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def _export(fn: Callable[..., object], *args: object, **kwargs: object) -> Exported:
    return jax.export.export(jax.jit(fn), platforms=("cpu", "cuda"))(*args, **kwargs)


def _nested(tree: dict[str, list[jax.Array]], *, scale: jax.Array) -> dict[str, object]:
    return {"z": (tree["b"][0] * scale,), "a": [jnp.concatenate(tree["a"]), None]}


def _export_nested() -> Exported:
    b, scale, *a = _shapes("2, 3", "2, 3", "2", "3")
    return _export(_nested, {"b": [b], "a": a}, scale=scale)


@pytest.mark.parametrize(
    "made",
    [
        lambda: _export(lambda x: x + 1, *_shapes("b, 4")),
        lambda: _export(lambda x, y: y, *_shapes("b, 2*b + 1", "b")),
        lambda: _export(lambda x: {}, *_shapes("")),
        _export_nested,
    ],
)
def test_what_is_read_is_what_jax_reads(made: Callable[[], Exported]) -> None:
    """Arguments, results, their trees and dimensions, and which of them are used."""
    data = made().serialize()

    assert of_artifact(jax.export.deserialize(data)) == wrapper.read(data, "m").computation


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read(dtype: str) -> None:
    exported = _export(lambda x: x, *_shapes("2", dtype=dtype))

    (found,) = wrapper.read(exported.serialize(), "m").computation.results
    assert dtype == found.dtype


@pytest.mark.parametrize("version", ["0.6.2", "0.7.2", "0.8.3", "0.9.2", "0.10.2", "0.11.2"])
def test_files_of_all_versions_are_read(version: str) -> None:
    found = wrapper.read((DATA / version / "plain.jaxexp").read_bytes(), "plain.jaxexp")

    assert ("0.11.2" if version == "0.11.2" else "") == found.jax_version
    assert ("cpu", "cuda") == found.computation.platforms
    assert (({"x": 0},), {}) == found.computation.takes
    assert {"y": 0} == found.computation.returns
    assert ("float32", "b, 8") == (
        found.computation.arguments[0].dtype,
        found.computation.arguments[0].shape,
    )


def test_function_for_several_devices_is_refused() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    x = jax.ShapeDtypeStruct((4, 2), np.float32, sharding=sharding)
    exported = jax.export.export(jax.jit(lambda x: x))(x)

    with pytest.raises(InvalidModel, match="^m was exported for 2 devices, expected 1$"):
        wrapper.read(exported.serialize(), "m")


def test_nodes_of_a_class_of_their_own_are_refused() -> None:
    @jax.tree_util.register_pytree_node_class
    class Pair:
        def __init__(self, left: object) -> None:
            self.left = left

        def tree_flatten(self) -> tuple[tuple[object], None]:
            return (self.left,), None

        @classmethod
        def tree_unflatten(cls, aux: None, children: tuple[object]) -> "Pair":
            return cls(*children)

    jax.export.register_pytree_node_serialization(
        Pair,
        serialized_name="tests.Pair",
        serialize_auxdata=lambda aux: b"",
        deserialize_auxdata=lambda data: None,
    )
    exported = _export(lambda pair: pair.left, Pair(*_shapes("2")))

    with pytest.raises(InvalidModel, match="arguments or results use a custom pytree class$"):
        wrapper.read(exported.serialize(), "m")


@given(st.data())
def test_cut_and_flipped_files_are_refused_or_read(data: st.DataObject) -> None:
    """Reading any bytes ends, and raises nothing but InvalidModel."""
    content = bytearray((DATA / "0.12.0.1" / "plain.jaxexp").read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) * 8 - 1), max_size=8)):
        content[position // 8] ^= 1 << position % 8
    cut = content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))]

    try:
        found = wrapper.read(cut, "m")
    except InvalidModel as error:
        assert str(error).startswith("m ")
    else:
        assert len(found.computation.module) <= len(content)
