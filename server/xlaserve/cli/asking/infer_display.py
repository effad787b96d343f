"""Display of inference results: values, classes, JSON, or a file of arrays."""

import base64
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from xlaserve.cli.printable import printable
from xlaserve.dialing.interface import InferenceResult
from xlaserve.errors import InvalidRequest
from xlaserve.tensors import Kind, Tensor, TensorSpec, describe, kind_of

_WHOLE_ELEMENTS = 100
"""Larger arrays are abbreviated, as in numpy."""
_EDGE_ELEMENTS = 3
_SHOWN_CHARACTERS = 60
"""Maximum number of characters shown of a BYTES element."""
_SHOWN_ROWS = 8
"""Maximum number of rows whose classes are shown."""


@dataclass(frozen=True, slots=True)
class Classes:
    """How to display the classes of an output."""

    count: int
    """Number of highest scores to show per row."""
    labels: Sequence[str] = ()
    """Class names by index; empty if they are unknown."""


def show(
    console: Console,
    result: InferenceResult,
    classes: Classes | None,
    classified: Mapping[str, TensorSpec] = MappingProxyType({}),
) -> None:
    """Print every output: its top classes if requested and it has scores, otherwise its values.

    Outputs in `classified` contain classes found by the server.
    """
    _say(console, f"{_source(result)}, {result.seconds * 1000:.1f} ms")
    for name, array in result.outputs.items():
        spec = classified.get(name) if array.dtype.hasobject else None
        if spec is not None and (rows := _found_classes(array)):
            _say(console, f"{printable(name)} {spec}")
            _show_classified(console, rows)
            continue
        _say(console, f"{printable(name)} {describe(result.datatypes[name], array.shape)}")
        if classes is not None and _has_scores(array):
            _show_classes(console, array, classes)
        else:
            _say(console, values(array, console.width))


def as_json(result: InferenceResult) -> str:
    """Return the answer as JSON: nested lists, with NaN and Infinity as in Python's json.

    An element of BYTES is a string if it is valid UTF-8, otherwise `{"b64": ...}`.
    """
    outputs = [
        {
            "name": name,
            "datatype": result.datatypes[name].name,
            "shape": list(array.shape),
            "data": _json_data(array),
        }
        for name, array in result.outputs.items()
    ]
    answer = {"model_name": result.model, "model_version": result.version, "outputs": outputs}
    return json.dumps(answer, ensure_ascii=False)


def write_npz(path: Path, result: InferenceResult) -> None:
    """Write the outputs to an .npz file; types that numpy does not support become FP32.

    Raises InvalidRequest if an element of BYTES would lose trailing zeros.
    """
    arrays = {name: _storable(name, array) for name, array in result.outputs.items()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def show_written(console: Console, path: Path, result: InferenceResult) -> None:
    """Print the outputs that were written to a file."""
    _say(console, _source(result))
    for name, array in result.outputs.items():
        _say(console, f"{printable(name)} {describe(result.datatypes[name], array.shape)}")
    _say(console, f"written to {path}")


def values(array: Tensor, width: int) -> str:
    """Format an array as numpy does: completely if it is small, otherwise abbreviated."""
    return np.array2string(
        _texts(array) if array.dtype.kind == "O" else array,
        max_line_width=width,
        threshold=_WHOLE_ELEMENTS,
        edgeitems=_EDGE_ELEMENTS,
        formatter={"object": str} if array.dtype.kind == "O" else None,
    )


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _source(result: InferenceResult) -> str:
    version = f" version {printable(result.version)}" if result.version else ""
    return f"{printable(result.model)}{version}"


# --- Classes ---


def _has_scores(array: Tensor) -> bool:
    return array.ndim > 0 and array.size > 0 and kind_of(array.dtype) in {Kind.INTEGER, Kind.FLOAT}


def _found_classes(array: Tensor) -> list[list[list[str]]]:
    """Parse classes into score, index and label, by row; return an empty list if malformed.

    An element is `score:class[:label]` (classification extension).
    """
    rows = array.reshape(1, -1) if array.ndim < len(("row", "class")) else array
    found = [[_parts_of(element) for element in row.ravel()] for row in rows]
    is_right = all(len(parts) > 1 for row in found for parts in row)
    return found if is_right else []


def _parts_of(element: bytes) -> list[str]:
    return [printable(part) for part in element.decode(errors="replace").split(":", 2)]


def _show_classified(console: Console, rows: Sequence[Sequence[Sequence[str]]]) -> None:
    has_labels = any(label for row in rows for _, _, *label in row)
    table = _table(len(rows), has_labels=has_labels)
    for number, row in enumerate(rows[:_SHOWN_ROWS]):
        for score, index, *label in row:
            named = ["".join(label)] if has_labels else []
            cells = [*([str(number)] if len(rows) > 1 else []), index, *named, score]
            table.add_row(*map(Text, cells))
    console.print(table)
    if len(rows) > _SHOWN_ROWS:
        _say(console, f"... and {len(rows) - _SHOWN_ROWS} rows more")


def _table(rows: int, *, has_labels: bool) -> Table:
    table = Table()
    if rows > 1:
        table.add_column("row", justify="right")
    table.add_column("class", justify="right")
    if has_labels:
        table.add_column("label")
    table.add_column("score", justify="right")
    return table


def _show_classes(console: Console, array: Tensor, classes: Classes) -> None:
    rows = array.reshape(-1, array.shape[-1])
    table = _table(len(rows), has_labels=bool(classes.labels))
    for number, scores in enumerate(rows[:_SHOWN_ROWS]):
        for cells in _best(scores, classes):
            table.add_row(*([str(number)] if len(rows) > 1 else []), *cells)
    console.print(table)
    if len(rows) > _SHOWN_ROWS:
        _say(console, f"... and {len(rows) - _SHOWN_ROWS} rows more")


def _best(scores: Tensor, classes: Classes) -> Iterator[list[str | Text]]:
    numbers = scores.astype(np.float64) if scores.dtype.kind not in "iu" else scores
    # Sort NaN last.
    order = np.argsort(np.where(np.isnan(numbers), -np.inf, numbers), kind="stable")[::-1]
    for index in order[: classes.count]:
        known = int(index) < len(classes.labels)
        label = (
            [Text(printable(classes.labels[int(index)]) if known else "")] if classes.labels else []
        )
        score = numbers[index]
        yield [str(index), *label, f"{score:.4f}" if numbers.dtype.kind == "f" else str(score)]


# --- Elements ---


def _texts(array: Tensor) -> Tensor:
    shown = np.empty(array.shape, object)
    shown.ravel()[:] = [_text(element) for element in array.ravel()]
    return shown


def _text(element: bytes) -> str:
    cut = element[:_SHOWN_CHARACTERS]
    try:
        shown = json.dumps(cut.decode(), ensure_ascii=False)
    except UnicodeDecodeError:
        shown = repr(cut)
    return printable(shown) + ("..." if len(element) > len(cut) else "")


def _json_data(array: Tensor) -> Any:
    if array.dtype.kind != "O":
        return array.tolist()
    found = np.empty(array.shape, object)
    found.ravel()[:] = [_json_element(element) for element in array.ravel()]
    return found.tolist()


def _json_element(element: bytes) -> Any:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(element).decode()}


def _storable(name: str, array: Tensor) -> Tensor:
    if array.dtype.kind == "O":
        if any(element.endswith(b"\0") for element in array.ravel()):
            raise InvalidRequest(
                f"output '{printable(name)}' has an element that ends with a zero byte, which an"
                " .npz file cannot keep: use --json"
            )
        return array.astype(np.bytes_)
    return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)
