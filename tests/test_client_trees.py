"""Trees of arrays as inputs and outputs, with their paths as tensor names."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.server import serving

import xlaserve
from xlaserve.client import AsyncClient
from xlaserve.errors import InvalidRequest
from xlaserve.tensors.client_trees import flattened, nested

KEYS = st.text(st.characters(codec="utf-8", exclude_characters="."), min_size=1)
LEAVES = st.integers(0, 9).map(lambda number: np.array([number]))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(
            KEYS.filter(lambda key: not key.isdecimal()), inner, min_size=1, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=30)
@given(tree=st.dictionaries(KEYS.filter(lambda key: not key.isdecimal()), TREES, min_size=1))
def test_what_is_flattened_comes_back(tree: dict[str, Any]) -> None:
    assert str(tree) == str(nested(flattened("m", tree)))


def test_values_that_are_no_trees_stay() -> None:
    """Lists of numbers are arrays; texts and documents have content types."""
    values = {"a": [1.0, 2.0], "b": ["cat"], "c": {"x": [1, None]}, "d": [np.float32(1)], "e": []}

    assert values == flattened("m", values)


def test_a_container_is_no_array_whatever_it_can_be_made_to() -> None:
    class Pair(tuple[Any, ...]):
        def __array__(self) -> np.ndarray[Any, Any]:
            raise AssertionError("it is taken for an array")

    assert ["a.0", "a.1"] == list(flattened("m", {"a": Pair((np.ones(1), np.ones(2)))}))


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        ({"a": {"b.c": np.ones(1)}}, "input 'a': expected string keys without dots, got 'b.c'"),
        ({"a": {"": np.ones(1)}}, "got ''"),
        ({"a": {None: np.ones(1)}}, "got None"),
        ({"a": [np.ones(1)], "a.0": np.ones(1)}, "model 'm': two inputs are named 'a.0'"),
    ],
)
def test_keys_that_no_path_has_are_refused(inputs: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        flattened("m", inputs)


def test_names_that_are_no_paths_stay_as_they_are() -> None:
    values = {"a": 1, "a.b": 2, ".c": 3, "d.0": 4, "d.2": 5, "e.1": 6, "e.0": 7}

    assert {"a": 1, "a.b": 2, ".c": 3, "d": {"0": 4, "2": 5}, "e": [7, 6]} == nested(values)


@pytest.mark.slow
async def test_a_tree_goes_in_and_comes_out(tmp_path: Path) -> None:
    """With the function of docs/exporting.md, over both transports."""

    def compare(_: Any, pair: Any, scale: Any) -> Any:
        left, right = pair
        return {"sum": {"all": (left + right) * scale["by"]}, "each": [left, right]}

    pair = [("FP32", [-1]), ("FP32", [-1])]
    described = {"pair": pair, "scale": {"by": ("FP32", [-1])}}
    xlaserve.export_model(
        compare, None, described, tmp_path / "models/compared/1", max_batch_size=1
    )
    ones = np.ones(1, np.float32)
    inputs = {"pair": (ones, jnp.array([2.0], jnp.float32)), "scale": {"by": 3 * ones}}
    settings: dict[str, Any] = {"http_endpoint": "port:0", "load_model": ("*",)}
    async with serving(tmp_path, tmp_path / "models", **settings) as server:
        for url in (server.url, f"http://{server.http}"):
            async with AsyncClient(url) as client:
                answer = await client.infer("compared", inputs)

            assert {"sum": {"all": [9.0]}, "each": [[1.0], [2.0]]} == {
                "sum": {"all": answer.tree["sum"]["all"].tolist()},
                "each": [each.tolist() for each in answer.tree["each"]],
            }
