"""Tensors whose shape for clients differs from the model's (`reshape`)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel
from xlaserve.model_config.text import parse_json
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.wrappers.reshaping import Reshape


def tensor(name: str, dims: list[int], reshape: list[int] | None = None) -> dict[str, Any]:
    shape = {} if reshape is None else {"reshape": {"shape": reshape}}
    return {"name": name, "data_type": "TYPE_FP32", "dims": dims} | shape


def load(directory: Path, **config: Any) -> Any:
    parsed = parse_json(json.dumps(config))
    return loaders.load(directory, LoadContext("m", "1", parsed))


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of FP32[-1,2,3] that returns the transposed rows and the sum of each row."""
    directory = tmp_path_factory.mktemp("models") / "m" / "1"
    export_model(
        lambda p, x: {"t": x.transpose(0, 2, 1), "s": x.sum((1, 2))},
        {},
        {"x": ("FP32", [-1, 2, 3])},
        directory,
        max_batch_size=4,
    )
    return directory


def test_a_model_is_given_and_gives_other_shapes_than_clients_see(version: Path) -> None:
    """Inputs go from 6 elements to 2 x 3, and a scalar per row becomes one element."""
    model = load(
        version,
        max_batch_size=4,
        input=[tensor("x", [6], [2, 3])],
        output=[tensor("t", [6, 1], [3, 2]), tensor("s", [1], [])],
    )
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    outputs = model.execute({"x": x})

    assert {"x": (-1, 6)} == {spec.name: spec.shape for spec in model.info.inputs}
    assert {"t": (-1, 6, 1), "s": (-1, 1)} == {s.name: s.shape for s in model.info.outputs}
    expected = x.reshape(2, 2, 3).transpose(0, 2, 1).reshape(2, 6, 1)
    np.testing.assert_array_equal(expected, outputs["t"])
    np.testing.assert_array_equal(x.sum(1)[:, None], outputs["s"])
    model.close()


def test_open_sizes_stand_for_those_of_the_artifact(version: Path) -> None:
    model = load(version, max_batch_size=4, input=[tensor("x", [-1, 1, -1], [-1, -1])])

    assert (-1, 2, 1, 3) == model.info.inputs[0].shape
    assert (1, 3, 2) == model.execute({"x": np.ones((1, 2, 1, 3), np.float32)})["t"].shape
    model.close()


def test_a_reshape_that_the_artifact_does_not_have_is_refused(version: Path) -> None:
    with pytest.raises(
        InvalidModel, match=r"input 'x': expected FP32\[-1,2,3\] as in the artifact"
    ):
        load(version, max_batch_size=4, input=[tensor("x", [6], [3, 2])])
    with pytest.raises(InvalidModel, match="reshape is not possible without a max_batch_size"):
        load(version, input=[tensor("x", [-1, 6], [-1, 2, 3])])


def test_an_identity_is_reshaped_on_both_sides(tmp_path: Path) -> None:
    model = load(
        tmp_path,
        backend="identity",
        max_batch_size=2,
        input=[tensor("x", [4], [2, 2])],
        output=[tensor("y", [1, 4], [2, 2])],
    )

    given = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(given.reshape(2, 1, 4), model.execute({"x": given})["y"])


def test_python_models_reshape_in_their_code(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.py").write_text(
        "class Model:\n"
        "    inputs = {'x': ('FP32', [2, 3])}\n"
        "    outputs = {'y': ('FP32', [2, 3])}\n"
        "    max_batch_size = 4\n"
        "    def infer(self, x):\n"
        "        return {'y': x}\n"
    )
    with pytest.raises(InvalidModel):
        load(tmp_path / "1", max_batch_size=4, input=[tensor("x", [6], [2, 3])])


@pytest.mark.parametrize(
    ("dims", "reshape", "problem"),
    [
        ([6], [2, 2], r"reshape: expected the number of elements of dims \[6\]"),
        ([2], [], r"reshape: expected the number of elements of dims \[2\]"),
        ([-1], [2, 3], ", also before, between and after the dynamic sizes"),
        ([2, -1], [-1, 2], ", also before, between and after the dynamic sizes"),
        ([4], [-1, 2], ", also before, between and after the dynamic sizes"),
        ([4], [0], r"reshape.shape\[0\]: expected a size above 0, or -1 for any, got 0"),
        ([4], [-2], r"reshape.shape\[0\]: expected a size above 0"),
    ],
)
@pytest.mark.parametrize("side", ["input", "output"])
def test_a_reshape_that_keeps_not_every_element_is_refused(
    side: str, dims: list[int], reshape: list[int], problem: str
) -> None:
    with pytest.raises(InvalidModel, match=problem):
        parse_json(json.dumps({side: [tensor("x", dims, reshape)]}))


def test_the_same_shape_is_no_reshape() -> None:
    config = parse_json(json.dumps({"input": [tensor("x", [2, 2], [2, 2])]}))

    assert not config.is_reshaped


def test_sequences_are_not_reshaped() -> None:
    config = {"input": [tensor("x", [1], [])], "sequence_batching": {}}
    with pytest.raises(InvalidModel, match="cannot be combined with sequence_batching"):
        parse_json(json.dumps(config))


@given(
    st.integers(0, 1),
    st.lists(st.tuples(st.sampled_from([(), (2,), (2, 3), (6, 1)]), st.booleans()), max_size=4),
    st.integers(1, 3),
)
def test_every_element_keeps_its_place(
    lead: int, parts: list[tuple[tuple[int, ...], bool]], size: int
) -> None:
    """Elements stay in row-major order, in both directions, whichever dimensions are dynamic."""
    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()
    for dims, is_open in parts:
        source += (*dims, -1) if is_open else dims
        target += (*dims[::-1], -1) if is_open else dims[::-1]
    real = tuple(size if one == -1 else one for one in source)
    given = np.arange(2**lead * int(np.prod(real))).reshape((*(2,) * lead, *real))
    there = Reshape(lead, source, target)(given)

    assert given.ravel().tolist() == there.ravel().tolist()
    np.testing.assert_array_equal(given, Reshape(lead, target, source)(there))
