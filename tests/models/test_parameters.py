from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from xlaserve.artifact.parameters import Parameters, flatten, has_64_bit
from xlaserve.errors import InvalidModel


class _Layer(NamedTuple):
    weight: "np.ndarray[Any, Any]"
    bias: "np.ndarray[Any, Any]"


def _names(params: object) -> list[str]:
    return list(flatten(params, x64=True).arrays)


def _rebuilt(parameters: Parameters) -> Any:
    return parameters.unflatten([jnp.asarray(array) for array in parameters.arrays.values()])


ONE = np.ones(1, np.float32)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"b": ONE, "a": ONE.copy()}, ["a", "b"]),
        ([ONE, (ONE.copy(), {"x": ONE.copy()})], ["0", "1/0", "1/1/x"]),
        (_Layer(ONE, ONE.copy()), ["weight", "bias"]),
        ({3: ONE, 20: ONE.copy()}, ["3", "20"]),
        (ONE, ["params"]),
        (np.float32(1), ["params"]),
        (None, []),
        ((), []),
    ],
)
def test_arrays_are_named_by_their_path(params: object, expected: list[str]) -> None:
    assert expected == _names(params)


def test_flax_state_is_named_by_its_path() -> None:
    _, state = nnx.split(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))

    assert ["bias/value", "mean/value", "scale/value", "var/value"] == _names(state)


def test_equinox_module_keeps_its_functions() -> None:
    mlp = eqx.nn.MLP(2, 2, 2, 1, key=jax.random.key(0))

    parameters = flatten(mlp, x64=False)

    names = [f"layers/{layer}/{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    assert names == list(parameters.arrays)
    assert mlp.activation is _rebuilt(parameters).activation


@pytest.mark.parametrize("leaf", [2, 0.5, "text", len, True])
def test_leaf_that_is_no_array_stays_what_it_is(leaf: object) -> None:
    rebuilt = _rebuilt(flatten({"w": ONE, "leaf": leaf}, x64=False))

    assert leaf is rebuilt["leaf"]


def test_tied_arrays_are_stored_once() -> None:
    table = np.ones((3, 2), np.float32)

    parameters = flatten({"embed": table, "unembed": table}, x64=False)

    assert ["embed"] == list(parameters.arrays)
    assert {"embed", "unembed"} == _rebuilt(parameters).keys()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_key_is_stored_as_its_words(impl: str) -> None:
    key = jax.random.key(5, impl=impl)

    parameters = flatten({"key": key}, x64=False)

    assert np.uint32 == parameters.arrays["key"].dtype
    assert key == _rebuilt(parameters)["key"]


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.uint64])
@pytest.mark.parametrize("x64", [True, False])
def test_wide_arrays_are_narrowed_only_without_x64(dtype: type, x64: bool) -> None:
    (array,) = flatten(np.ones(1, dtype), x64=x64).arrays.values()

    assert array.dtype.itemsize == (8 if x64 else 4)


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float16, ml_dtypes.bfloat16])
def test_other_dtypes_stay_what_they_are(dtype: type) -> None:
    (array,) = flatten(np.ones(1, dtype), x64=False).arrays.values()

    assert dtype == array.dtype


def test_weak_types_are_remembered() -> None:
    weak = jnp.asarray(1.0) * 1
    strong = jnp.ones(1, jnp.float32)

    parameters = flatten([jax.lax.full((1,), weak), weak, strong], x64=False)

    assert [jnp.asarray(leaf).weak_type for leaf in (weak, strong)] == [*parameters.weak_types[1:]]


def _clashing_names() -> object:
    return {"a/b": ONE, "a": {"b": ONE.copy()}}


def _complex() -> object:
    return {"a": np.ones(1, np.complex64)}


def _text() -> object:
    return {"a": np.array(["text"])}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (_clashing_names, "two parameters have the path 'a/b'"),
        (_complex, "parameter 'a' has dtype complex64, expected numbers"),
        (_text, "parameter 'a' has dtype <U4, expected numbers"),
    ],
)
def test_parameters_that_cannot_be_stored_are_refused(
    make: Callable[[], object], expected: str
) -> None:
    with pytest.raises(InvalidModel) as caught:
        flatten(make(), x64=False)
    assert expected == str(caught.value)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"a": np.ones(1, np.float64)}, True),
        ({"a": ONE, "b": np.int64(3)}, True),
        ({"a": ONE, "b": 3, "c": 0.5}, False),
        (np.ones(1, np.complex64), False),
        (jax.random.key, False),
    ],
)
def test_wide_arrays_are_found(params: object, expected: bool) -> None:
    assert expected is has_64_bit(params)
