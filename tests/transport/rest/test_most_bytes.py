"""The size estimate made before an answer is written is never too small."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from xlaserve.http.json.json_tensors import JsonRules
from xlaserve.http.messages import JSON_TYPE, HttpResponse
from xlaserve.http.sagemaker.plain_tensors import (
    CSV_TYPE,
    JSONLINES_TYPE,
    most_plain_bytes,
    write_plain_response,
)
from xlaserve.http.threads import Size
from xlaserve.http.v2.generate_json import write_generate_answer
from xlaserve.http.v2.infer_request import BINARY_DATA
from xlaserve.http.v2.infer_response import most_json_bytes, output_bytes, write_infer_answer
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.inference import (
    DetailedResponse,
    InferOutput,
    InferRequest,
    InferResponse,
    RequestedOutput,
)
from xlaserve.tensors import BYTES, DATATYPES, Datatype, Parameter, TensorSpec

PARAMETERS: st.SearchStrategy[Mapping[str, Parameter]] = st.dictionaries(
    st.text(max_size=3), st.one_of(st.text(max_size=3), st.booleans(), st.integers(0, 9))
)
ODD: Mapping[str, Any] = {
    "f": [np.nan, np.inf, -np.inf, -1.1754943508222875e-38, -2.2250738585072014e-308],
    "O": [b"\x00" * 4, b'"\\\x7f', b"\xff\xfe", b"\xc3\xa9", b"\xf0\x9f\x98\x80", b"a"],
}
"""For each kind of datatype the elements with the longest text."""


def elements_of(datatype: Datatype, rules: JsonRules) -> st.SearchStrategy[Any]:
    kind = datatype.dtype.kind
    if datatype is BYTES:
        texts = st.one_of(st.sampled_from(ODD["O"]), st.text(max_size=4).map(str.encode))
        return texts if rules.surrogates else texts.filter(is_text)
    if datatype.name == "BF16":
        return st.integers(-128, 128).map(datatype.dtype.type)
    whole = npst.from_dtype(datatype.dtype)
    odd = st.sampled_from(ODD["f"]).map(datatype.dtype.type)
    return st.one_of(whole, odd) if kind == "f" else whole


def is_text(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


@st.composite
def outputs(draw: st.DrawFn, names: list[str], rules: JsonRules, dims: int) -> InferOutput:
    datatype = DATATYPES[draw(st.sampled_from(names))]
    shape = draw(npst.array_shapes(min_dims=dims, max_dims=3, min_side=0, max_side=3))
    data = draw(npst.arrays(datatype.dtype, shape, elements=elements_of(datatype, rules)))
    return InferOutput(draw(st.text(max_size=3)), datatype, data)


ALL = list(DATATYPES)
IN_JSON = [row.name for row in DATATYPES.values() if row.contents is not None]
RULES = st.sampled_from([JsonRules(), JsonRules(surrogates=True)])


def total(size: Size) -> int:
    return size if isinstance(size, int) else size()


def length(answer: HttpResponse) -> int:
    return sum(memoryview(part).nbytes for part in answer.parts)


def responses(draw: st.DrawFn, found: list[InferOutput]) -> InferResponse:
    texts = draw(st.tuples(st.text(max_size=9), st.text(max_size=3), st.text(max_size=9)))
    if draw(st.booleans()):
        return InferResponse(*texts, outputs=tuple(found))
    of_outputs = {output.name: draw(PARAMETERS) for output in found}
    return DetailedResponse(*texts, tuple(found), draw(PARAMETERS), of_outputs)


@settings(max_examples=40)
@given(st.data(), RULES)
def test_of_an_answer_in_json_and_binary(data: st.DataObject, rules: JsonRules) -> None:
    one = st.one_of(
        st.tuples(outputs(ALL, rules, 0), st.just(True)),
        st.tuples(outputs(IN_JSON, rules, 0), st.just(False)),
    )
    found = data.draw(st.lists(one, max_size=3, unique_by=lambda pair: pair[0].name))
    response = data.draw(st.composite(responses)([output for output, _ in found]))
    wanted = tuple(RequestedOutput(o.name, {BINARY_DATA: is_binary}) for o, is_binary in found)
    request = InferRequest("m", outputs=wanted)
    answer = write_infer_answer(request, response, rules)

    most = total(most_json_bytes(response, request, rules))
    binary = output_bytes(response) + sum(4 * o.data.size for o, is_binary in found if is_binary)
    assert length(answer) <= most + (binary if any(is_binary for _, is_binary in found) else 0)


@settings(max_examples=40)
@given(st.data(), RULES)
def test_of_an_answer_of_generate(data: st.DataObject, rules: JsonRules) -> None:
    one = outputs(IN_JSON, rules, 0)
    found = data.draw(st.lists(one, max_size=3, unique_by=lambda output: output.name))
    response = data.draw(st.composite(responses)(found))

    written = length(write_generate_answer(response, rules))
    assert written <= total(most_json_bytes(response, rules=rules))


@pytest.mark.parametrize("media_type", [JSON_TYPE, JSONLINES_TYPE, CSV_TYPE])
@pytest.mark.parametrize("batch", [0, 8])
@settings(max_examples=40)
@given(st.data(), RULES)
def test_of_an_answer_of_plain_tensors(
    media_type: str, batch: int, data: st.DataObject, rules: JsonRules
) -> None:
    if media_type == CSV_TYPE:
        rules = JsonRules()
    count = 1 if media_type == CSV_TYPE else 3
    one = outputs(ALL, rules, 1)
    found = data.draw(
        st.lists(one, min_size=1, max_size=count, unique_by=lambda output: output.name)
    )
    rows = min(len(output.data) for output in found)
    found = [InferOutput(o.name, o.datatype, o.data[:rows]) for o in found]
    if media_type == CSV_TYPE:
        found = [InferOutput(o.name, o.datatype, o.data.reshape(rows, -1)) for o in found if rows]
    if not found:
        return
    info = ModelInfo("test", (), tuple(TensorSpec(o.name, o.datatype, (-1,)) for o in found), batch)
    response = InferResponse("m", "1", "", outputs=tuple(found))

    written = length(write_plain_response(info, response, media_type, rules))
    assert written <= total(most_plain_bytes(response, rules))


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_of_numbers_that_are_not_finite_among_long_ones(datatype: str) -> None:
    """NaN needs no more room than a finite number, and does not lengthen finite ones."""
    row = DATATYPES[datatype]
    array = np.full(1000, ODD["f"][3 if datatype == "FP32" else 4], row.dtype)
    finite = InferResponse("m", "1", "", outputs=(InferOutput("y", row, array),))
    mixed = array.copy()
    mixed[::10] = np.nan
    response = InferResponse("m", "1", "", outputs=(InferOutput("y", row, mixed),))
    request = InferRequest("m", outputs=(RequestedOutput("y"),))

    assert total(most_json_bytes(response)) == total(most_json_bytes(finite))
    written = length(write_infer_answer(request, response))
    assert written < length(write_infer_answer(request, finite))
    assert written <= total(most_json_bytes(response))
