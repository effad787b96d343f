"""Display of outputs of every kind, as tables, as JSON, and in files."""

import io
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rich.console import Console

from xlaserve.app.display import ModelRow
from xlaserve.cli.asking import infer_display
from xlaserve.cli.asking.infer_display import Classes
from xlaserve.cli.display import model_table
from xlaserve.dialing.interface import InferenceResult
from xlaserve.errors import InvalidRequest
from xlaserve.residence.catalog import IndexEntry
from xlaserve.tensors import TensorSpec, datatype_named, datatype_of


def result(**outputs: Any) -> InferenceResult:
    arrays = {name: np.asarray(array) for name, array in outputs.items()}
    datatypes = {name: datatype_of(array.dtype) for name, array in arrays.items()}
    assert all(datatypes.values())
    return InferenceResult("m", "1", arrays, datatypes, 0.0015)  # type: ignore[arg-type]


def texts(*elements: bytes) -> Any:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array


def shown(classes: Classes | None = None, **outputs: Any) -> str:
    target = io.StringIO()
    infer_display.show(Console(file=target, width=80), result(**outputs), classes)
    return target.getvalue()


def test_the_values_of_one_row_of_numbers_are_shown() -> None:
    """They are classes only on request."""
    assert "m version 1, 1.5 ms\ny FP32[1,3]\n[[0.5 1.  2. ]]\n" == shown(
        y=np.array([[0.5, 1, 2]], np.float32)
    )


def test_a_large_array_is_shown_by_its_edges() -> None:
    text = shown(y=np.arange(10**6).reshape(1000, 1000))

    assert "[     0      1      2 ...    997    998    999]" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.array(3, np.int8), "y INT8[]\n3\n"),
        (np.zeros((0, 2), np.float32), "y FP32[0,2]\n[]\n"),
        (np.array([True, False]), "y BOOL[2]\n[ True False]\n"),
        (np.array([np.nan, np.inf], np.float32), "y FP32[2]\n[nan inf]\n"),
        (np.array([1.5, 2], ml_dtypes.bfloat16), "y BF16[2]\n[1.5 2]\n"),
        (texts(b"a\n\x1b[2J", "é".encode(), b"\xff"), 'y BYTES[3]\n["a\\n\\u001b[2J" "é" '),
        (texts(b"x" * 1000), f'y BYTES[1]\n["{"x" * 60}"...]\n'),
    ],
)
def test_elements_of_every_kind_are_shown(array: Any, text: str) -> None:
    assert shown(y=array).split("\n", 1)[1].startswith(text)


def test_a_name_of_the_server_cannot_write_to_the_terminal() -> None:
    outputs: dict[str, Any] = {"y\x1b[2J\n[red]": np.zeros(1)}
    text = shown(None, **outputs)

    assert r"y\x1b[2J\n[red] FP64[1]" in text


def test_classes_are_shown_where_they_are_asked_for() -> None:
    """For each row; NaN is not a score."""
    scores = np.array([[0.1, 0.7, np.nan, 0.2], [5, 4, 3, 2]], np.float32)
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in shown(Classes(2, ["cat", "dog"]), y=scores).splitlines()
        if line.startswith("│")
    ]

    assert [
        ["0", "1", "dog", "0.7000"],
        ["0", "3", "", "0.2000"],
        ["1", "0", "cat", "5.0000"],
        ["1", "1", "dog", "4.0000"],
    ] == cells


def test_more_rows_than_anybody_reads_are_counted() -> None:
    assert "... and 92 rows more" in shown(Classes(1), y=np.zeros((100, 3)))


def test_texts_have_no_classes() -> None:
    assert '["a"]' in shown(Classes(3), y=texts(b"a"))


def test_json_has_the_values() -> None:
    answer = json.loads(
        infer_display.as_json(
            result(
                y=np.array([[1.5, np.nan]], np.float32),
                z=texts(b"a", b"\xff"),
                b=np.array([1.5], ml_dtypes.bfloat16),
            )
        )
    )

    assert ("m", "1") == (answer["model_name"], answer["model_version"])
    assert ["y", "z", "b"] == [output["name"] for output in answer["outputs"]]
    assert "[[1.5, NaN]]" == json.dumps(answer["outputs"][0]["data"])
    assert {
        "name": "z",
        "datatype": "BYTES",
        "shape": [2],
        "data": ["a", {"b64": "/w=="}],
    } == answer["outputs"][1]
    assert ("BF16", [1.5]) == (answer["outputs"][2]["datatype"], answer["outputs"][2]["data"])


def test_a_file_has_the_arrays(tmp_path: Path) -> None:
    """Including one whose name equals the file parameter of numpy's function."""
    path = tmp_path / "out.npz"
    infer_display.write_npz(
        path,
        result(
            file=np.arange(6, dtype=np.int16).reshape(2, 3),
            texts=texts(b"a", b"bcd"),
            b=np.array([1.5], ml_dtypes.bfloat16),
        ),
    )
    with np.load(path, allow_pickle=False) as found:
        arrays = dict(found)

    assert [[0, 1, 2], [3, 4, 5]] == arrays["file"].tolist()
    assert np.int16 == arrays["file"].dtype
    assert [b"a", b"bcd"] == arrays["texts"].tolist()
    assert ([1.5], np.float32) == (arrays["b"].tolist(), arrays["b"].dtype)


def test_a_file_that_would_lose_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="output 'y' has an element that ends with a zero"):
        infer_display.write_npz(tmp_path / "out.npz", result(y=texts(b"a\0")))

    assert [] == list(tmp_path.iterdir())


def test_the_table_of_models_shows_reasons_as_they_are() -> None:
    """Control characters and markup from a file are not interpreted."""
    entry = IndexEntry("m", "1", "UNAVAILABLE", "[red]x\x1b[2J")
    target = io.StringIO()
    Console(file=target, width=80).print(model_table([ModelRow(entry, None, None)]))

    assert r"[red]x\x1b[2J" in target.getvalue()


def test_what_a_server_answers_in_the_place_of_classes_is_shown_as_it_is() -> None:
    spec = TensorSpec("y", datatype_named("FP32"), (-1, 3))
    target = io.StringIO()
    for array in (texts(b"cat"), np.array([[0.5, 1.0]], np.float32)):
        infer_display.show(Console(file=target, width=80), result(y=array), None, {"y": spec})

    assert 'y BYTES[1]\n["cat"]\n' in target.getvalue()
    assert "y FP32[1,2]\n[[0.5 1. ]]\n" in target.getvalue()
