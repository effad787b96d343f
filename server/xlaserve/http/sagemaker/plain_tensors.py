"""Plain tensors as request and response bodies: JSON, JSON lines, CSV, .npy and images."""

import codecs
import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
import numpy as np

from xlaserve.errors import (
    InvalidBody,
    InvalidRequest,
    InvalidTensor,
    NotAcceptable,
    OutputNotInForm,
    OutputNotText,
    UnsupportedMediaType,
)
from xlaserve.http.accept import ANY, preferred
from xlaserve.http.json.json_numbers import write_with_numbers
from xlaserve.http.json.json_tensors import (
    DEFAULT_RULES,
    ESCAPED_CHARACTERS,
    MOST_CHARACTERS,
    JsonRules,
    escaped_text,
    list_sizes,
    text_of,
    write_as_python,
)
from xlaserve.http.json.json_text import WHITESPACE, check_elements, check_members
from xlaserve.http.json.large_arrays import LARGE_BYTES, cut_arrays, read_array
from xlaserve.http.messages import JSON_TYPE, HttpResponse
from xlaserve.http.sagemaker.npy import read_npy, write_npy
from xlaserve.http.threads import Size
from xlaserve.http.v2.infer_response import MOST_OF_OTHERS, texts_bytes
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import InferInput, InferOutput, InferRequest, InferResponse
from xlaserve.tensors import (
    BYTES,
    MAX_DIMENSIONS,
    Buffer,
    Datatype,
    Kind,
    Shape,
    Tensor,
    TensorDataError,
    TensorSpec,
    from_elements,
)

CSV_TYPE = "text/csv"
NPY_TYPE = "application/x-npy"
JSONLINES_TYPE = "application/jsonlines"
IMAGE_TYPES = "image/*"
X_IMAGE_TYPE = "application/x-image"
"""Media type of any image in SageMaker's own containers."""

_TRUTHS: Mapping[str, bool] = MappingProxyType(
    {"true": True, "1": True, "false": False, "0": False}
)
_SHOWN = 200
_OBJECT_BYTES = 64
"""Maximum punctuation and indentation per object, and per name in it."""
_LIST_CHARACTERS = len("[],")
_STRICT = JsonRules(strict=True)

_Read: TypeAlias = Callable[[TensorSpec, memoryview], tuple[Datatype, Tensor]]
"""Decodes a body for an input; raises InvalidBody or TensorDataError."""


# --- Reading -----------------------------------------------------------------------------------


def read_plain_request(
    info: ModelInfo, model: str, media_type: str, body: memoryview
) -> InferRequest:
    """Decode a body as the model's only input.

    A row without the batch dimension becomes a batch of one. The caller has checked the nesting
    depth of JSON. Raises UnsupportedMediaType and other subclasses of InvalidRequest.
    """
    read = _READERS.get(IMAGE_TYPES if media_type.startswith("image/") else media_type)
    if read is None:
        raise UnsupportedMediaType(media_type, _READERS)
    if len(info.inputs) != 1:
        raise InvalidRequest(
            f"model '{model}': a body of '{media_type}' is for models with one input, it has "
            f"{len(info.inputs)}: send a V2 inference request"
        )
    if not len(body):
        raise InvalidBody(f"expected a body of {media_type}, got an empty one")
    spec = info.inputs[0]
    try:
        datatype, data = read(spec, body)
    except TensorDataError as error:
        raise InvalidTensor(model, "input", spec.name, error.expected, error.got) from error
    if spec.accepts((1, *data.shape)):
        data = data[np.newaxis]
    return InferRequest(model, inputs=(InferInput(spec.name, datatype, data),))


class _Instances(msgspec.Struct):
    instances: msgspec.Raw


_INSTANCES = msgspec.json.Decoder(_Instances)
_VALUE = msgspec.json.Decoder()


def _read_json(spec: TensorSpec, body: memoryview) -> tuple[Datatype, Tensor]:
    large = _read_large(spec.datatype, body) if len(body) > LARGE_BYTES else None
    if large is not None:
        return spec.datatype, large
    try:
        text = bytes(_INSTANCES.decode(body).instances) if is_object(body) else bytes(body)
        if len(text) > LARGE_BYTES and not _is_tensor(spec.datatype, text):
            check_elements(text)
        value = _VALUE.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidBody(f"expected a list in JSON, or one as 'instances': {error}") from error
    except RecursionError:
        raise InvalidBody("the JSON is nested too deeply") from None
    shape, elements = _flattened(value)
    return spec.datatype, from_elements(spec.datatype, shape, elements)


def _read_large(datatype: Datatype, body: memoryview) -> Tensor | None:
    """Read a large, regular list of numbers; return None for anything else."""
    if not is_object(body):
        return read_array(datatype, None, body, MAX_DIMENSIONS)
    cut = cut_arrays(body)
    if cut is None:
        return None
    try:
        marker = bytes(_INSTANCES.decode(cut.document).instances)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if {marker} != cut.arrays.keys():
        return None
    return cut.read(datatype, None, marker, MAX_DIMENSIONS)


def _read_jsonlines(spec: TensorSpec, body: memoryview) -> tuple[Datatype, Tensor]:
    """Read each line as a row: a list, or a single element."""
    rows = []
    lines = bytes(body).splitlines()
    large = _read_long_lines(spec.datatype, lines) if len(body) > LARGE_BYTES else None
    if large is not None:
        return spec.datatype, large
    for number, line in enumerate(lines, start=1):
        if line.strip():
            check_members(line)
            if len(line) > LARGE_BYTES and not _is_tensor(spec.datatype, line):
                check_elements(line)
            try:
                rows.append(_VALUE.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidBody(f"line {number}: expected a list in JSON: {error}") from error
            except RecursionError:
                raise InvalidBody(f"line {number}: the JSON is nested too deeply") from None
    if not rows:
        raise InvalidBody("expected lines of JSON, got blank lines")
    shape, elements = _flattened(rows)
    return spec.datatype, from_elements(spec.datatype, shape, elements)


def _read_long_lines(datatype: Datatype, lines: Sequence[bytes]) -> Tensor | None:
    """Read lines that are long, regular lists of numbers of the same shape; else return None."""
    rows: list[Tensor] = []
    for line in lines:
        text = line.strip()
        if not text:
            continue
        row = None
        if len(text) > LARGE_BYTES:
            row = read_array(datatype, None, memoryview(text), MAX_DIMENSIONS - 1)
        if row is None or row.shape != (rows or [row])[0].shape:
            return None
        rows.append(row)
    if len(rows) == 1:
        return rows[0][np.newaxis]
    return np.stack(rows) if rows else None


def _is_tensor(datatype: Datatype, line: bytes) -> bool:
    """Tell whether the lists in a text are nested regularly and not empty."""
    try:
        return 0 not in list_sizes(datatype, line.strip())
    except TensorDataError:
        return False


def is_object(text: memoryview) -> bool:
    """Tell whether a JSON value is an object, from its first characters."""
    return bytes(text[:_SHOWN]).lstrip(WHITESPACE)[:1] == b"{"


def _flattened(value: object) -> tuple[Shape, list[object]]:
    """Return the shape of nested lists, and their elements."""
    shape: list[int] = []
    level: list[object] = [value]
    while level and isinstance(level[0], list):
        lists = [part for part in level if isinstance(part, list)]
        lengths = set(map(len, lists))
        if len(lists) < len(level) or len(lengths) > 1 or len(shape) == MAX_DIMENSIONS:
            raise TensorDataError(
                "lists of equal length on each level", "lists of different lengths"
            )
        shape += lengths
        level = list(chain.from_iterable(lists))
    return tuple(shape), level


def _read_csv(spec: TensorSpec, body: memoryview) -> tuple[Datatype, Tensor]:
    # Not the codec utf-8-sig, which drops an incomplete BOM at the end of the text.
    if bytes(body[: len(codecs.BOM_UTF8)]) == codecs.BOM_UTF8:
        body = body[len(codecs.BOM_UTF8) :]
    if not bytes(body).strip():
        raise InvalidBody("expected rows of CSV, got blank lines")
    # Decode incrementally to avoid a second copy of the text.
    text = io.TextIOWrapper(io.BytesIO(body), encoding="utf-8", newline="")
    read = _read_texts if spec.datatype.dtype.kind in "bO" else _read_numbers
    try:
        elements, shape = read(spec.datatype, text)
    except (ValueError, csv.Error) as error:
        reason = str(error).partition("; ")[0][:_SHOWN]
        raise TensorDataError(f"rows of {spec.datatype} in CSV", reason) from error
    fitting = next(filter(spec.accepts, _shapes_of_rows(spec, *shape)), shape)
    return spec.datatype, from_elements(spec.datatype, fitting, elements)


def _read_numbers(datatype: Datatype, text: io.TextIOWrapper) -> tuple[Tensor, tuple[int, int]]:
    kind = datatype.dtype.kind
    wide = {"i": np.int64, "u": np.uint64}.get(kind, np.float64)
    rows = np.loadtxt(text, wide, comments=None, delimiter=",", ndmin=2)
    return rows.reshape(-1), (rows.shape[0], rows.shape[1])


def _read_texts(
    datatype: Datatype, text: io.TextIOWrapper
) -> tuple[Sequence[object], tuple[int, int]]:
    rows = [row for row in csv.reader(text, strict=True) if row]
    if len(set(map(len, rows))) != 1:
        raise ValueError("rows of different lengths")
    cells = list(chain.from_iterable(rows))
    elements = cells if datatype is BYTES else [_truth(cell) for cell in cells]
    return elements, (len(rows), len(rows[0]))


def _truth(cell: str) -> bool:
    truth = _TRUTHS.get(cell.strip().lower())
    if truth is None:
        raise ValueError(f"{cell[:_SHOWN]!r}")
    return truth


def _shapes_of_rows(spec: TensorSpec, rows: int, columns: int) -> Iterator[Shape]:
    """Yield possible shapes of rows: as given, flattened batch entries, or a single entry."""
    yield rows, columns
    entry = spec.shape[1:]
    if -1 not in entry and prod(entry) == columns:
        yield rows, *entry
    if rows == 1:
        yield (columns,)


def _read_npy(spec: TensorSpec, body: memoryview) -> tuple[Datatype, Tensor]:
    return spec.datatype, read_npy(spec.datatype, body)


def _read_image(spec: TensorSpec, body: memoryview) -> tuple[Datatype, Tensor]:
    """Keep the encoded file: the core decodes it for models that take images."""
    element = np.empty(1, dtype=np.object_)
    element[0] = bytes(body)
    return BYTES, element


_READERS: Mapping[str, _Read] = MappingProxyType(
    {
        JSON_TYPE: _read_json,
        CSV_TYPE: _read_csv,
        NPY_TYPE: _read_npy,
        IMAGE_TYPES: _read_image,
        X_IMAGE_TYPE: _read_image,
        JSONLINES_TYPE: _read_jsonlines,
    }
)

PLAIN_TYPES = tuple(_READERS)


# --- Writing -----------------------------------------------------------------------------------


def most_plain_bytes(response: InferResponse, rules: JsonRules) -> Size:
    """Return the maximum size of the outputs in JSON, JSON lines or CSV."""
    size, texts = _OBJECT_BYTES, list[Tensor]()
    for output in response.outputs:
        shape = output.data.shape
        lists = sum(prod(shape[:axis]) for axis in range(len(shape) + 1))
        # Each row may be an object with all outputs.
        name = ESCAPED_CHARACTERS * len(output.name.encode()) + _OBJECT_BYTES
        size += lists * _LIST_CHARACTERS + (1 + (shape[0] if shape else 0)) * name
        if output.datatype is BYTES:
            texts.append(output.data)
        else:
            is_float = output.datatype.kind is Kind.FLOAT
            most = MOST_OF_OTHERS if is_float else MOST_CHARACTERS[output.datatype.name]
            size += output.data.size * most
    return partial(texts_bytes, size, texts, rules) if texts else size


def _write_json(info: ModelInfo, response: InferResponse, rules: JsonRules) -> list[Buffer]:
    try:
        return [write_with_numbers(_predictions(info, response))]
    except (OutputNotInForm, OutputNotText):
        if rules == _STRICT:
            raise
    return [write_as_python(_predictions(info, response, rules))]


def _predictions(info: ModelInfo, response: InferResponse, rules: JsonRules = _STRICT) -> Any:
    values: dict[str, Any] = {o.name: _listed(response, o, rules) for o in response.outputs}
    predictions: Any = values
    if len(values) == 1:
        (predictions,) = values.values()
    elif info.max_batch_size:
        names = tuple(values)
        predictions = [
            dict(zip(names, row, strict=True)) for row in zip(*values.values(), strict=True)
        ]
    return {"predictions": predictions}


def _listed(response: InferResponse, output: InferOutput, rules: JsonRules) -> Any:
    data = output.data
    if output.datatype is BYTES:
        return _texts(response, output, rules).tolist()
    if output.datatype.kind is Kind.FLOAT:
        # Floats without typed contents, such as BF16, cannot be written as Python numbers.
        data = data.astype(np.float32) if output.datatype.contents is None else data
        if rules.strict and not np.isfinite(data).all():
            form, action = "JSON (strict_json)", f"ask for {NPY_TYPE}"
            raise OutputNotInForm(response.model_name, output.name, form, "NaN or Infinity", action)
    # Index with (): a single element is a number, not an array.
    return np.asarray(data, order="C")[()] if rules.strict else data.tolist()


def _texts(response: InferResponse, output: InferOutput, rules: JsonRules = _STRICT) -> Tensor:
    texts = np.empty(output.data.shape, dtype=np.object_)
    read = escaped_text if rules.surrogates else text_of
    try:
        texts.reshape(-1)[:] = [read(element) for element in output.data.reshape(-1)]
    except UnicodeError:
        raise OutputNotText(response.model_name, output.name) from None
    return texts


def _write_jsonlines(info: ModelInfo, response: InferResponse, rules: JsonRules) -> list[Buffer]:
    try:
        return _lines(map(write_with_numbers, _rows(response)))
    except (OutputNotInForm, OutputNotText):
        if rules == _STRICT:
            raise
    return _lines(map(write_as_python, _rows(response, rules)))


def _rows(response: InferResponse, rules: JsonRules = _STRICT) -> list[Any]:
    """Return each row's response: the only output, or an object of several outputs."""
    values = {o.name: _listed(response, o, rules) for o in response.outputs}
    if len(values) == 1:
        (rows,) = values.values()
        return list(rows)
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def _lines(rows: Iterable[bytes]) -> list[Buffer]:
    return [b"".join(row + b"\n" for row in rows)]


def _write_csv(info: ModelInfo, response: InferResponse, rules: JsonRules) -> list[Buffer]:
    (output,) = response.outputs
    data = _texts(response, output) if output.datatype is BYTES else output.data
    rows = data if data.ndim > 1 else data.reshape(-1, 1)
    written = io.StringIO(newline="")
    # numpy scalars format themselves with the fewest digits that identify them.
    csv.writer(written, lineterminator="\n").writerows(map(str, row) for row in rows)
    return [written.getvalue().encode()]


def _write_npy(info: ModelInfo, response: InferResponse, rules: JsonRules) -> list[Buffer]:
    return write_npy(response.outputs[0].data)


def _is_table(outputs: Sequence[TensorSpec]) -> bool:
    return len(outputs) == 1 and len(outputs[0].shape) <= 2


def _has_rows(outputs: Sequence[TensorSpec]) -> bool:
    return all(len(output.shape) > 0 for output in outputs) and (
        len(outputs) == 1 or all(output.shape[0] == -1 for output in outputs)
    )


def _is_numeric(outputs: Sequence[TensorSpec]) -> bool:
    return len(outputs) == 1 and outputs[0].datatype is not BYTES


@dataclass(frozen=True, slots=True)
class Form:
    """A media type that a response can have, and how to write a body of this type."""

    media_type: str
    can_hold: Callable[[Sequence[TensorSpec]], bool]
    write: Callable[[ModelInfo, InferResponse, JsonRules], list[Buffer]]
    """Returns the parts of a body; raises OutputNotInForm and OutputNotText."""


FORMS: Sequence[Form] = (
    Form(JSON_TYPE, lambda outputs: True, _write_json),
    Form(CSV_TYPE, _is_table, _write_csv),
    Form(NPY_TYPE, _is_numeric, _write_npy),
    Form(JSONLINES_TYPE, _has_rows, _write_jsonlines),
)


def write_plain_response(
    info: ModelInfo,
    response: InferResponse,
    media_type: str,
    rules: JsonRules = DEFAULT_RULES,
) -> HttpResponse:
    """Serialize the outputs in a form returned by `choose_form`.

    Raises OutputNotInForm and OutputNotText for values that the form, or for JSON the rules,
    forbid.

    JSON is `{"predictions": ...}` as in TensorFlow Serving: nested lists for a single output; for
    several outputs one object per row, or one object if the model has no batch dimension.
    """
    form = next(form for form in FORMS if form.media_type == media_type)
    return HttpResponse(content_type=media_type, parts=form.write(info, response, rules))


def choose_form(
    outputs: Sequence[TensorSpec], accept: str, *, default: str, others: Sequence[str] = ()
) -> str:
    """Return the media type of a response before inference runs; raises NotAcceptable.

    If the client has no preference, `default` is used, or JSON if `default` cannot represent the
    outputs. `others` are further media types that the caller can write.
    """
    offers = (*[form.media_type for form in FORMS if form.can_hold(outputs)], *others)
    if accept in ("", ANY):
        return preferred(default, offers) or JSON_TYPE
    chosen = preferred(accept, offers)
    if chosen is None:
        raise NotAcceptable(accept, offers)
    return chosen
