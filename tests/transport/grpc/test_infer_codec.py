"""The ModelInfer codec agrees with the generic one on every field and datatype."""

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.infer import described, directly, generically, outcome
from support.protobuf import Google

from xlaserve.errors import InvalidTensor
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.infer.infer_codec import InferCodec, tensor_offset
from xlaserve.grpc.infer.infer_decoder import InferDecoder
from xlaserve.grpc.infer.infer_encoder import JOINED_BYTES
from xlaserve.grpc.infer.tensors import write_outputs
from xlaserve.grpc.infer.typed_answers import Form, TypedAnswers
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.net.bounded_cache import BoundedCache
from xlaserve.serving.inference import DetailedResponse, InferOutput, InferResponse, PlacedOutput
from xlaserve.settings.choices import TypedAnswerForm
from xlaserve.tensors import BYTES, DATATYPES, Datatype, to_bytes
from xlaserve_proto.inference import (
    InferParameter,
    InferTensorContents,
    ModelInferRequest,
    ModelInferRequestInferInputTensor,
    ModelInferRequestInferRequestedOutputTensor,
    ModelInferResponse,
)

WARM = InferCodec(max_fields=100_000, max_depth=100)
"""Keeps its layouts from example to example, as in a server."""


def infer_codec(max_cached: int = 1024) -> InferCodec:
    return InferCodec(max_fields=100_000, max_depth=100, max_cached=max_cached)


# --- requests ----------------------------------------------------------------------------------

PARAMETERS = st.dictionaries(
    st.text(max_size=3),
    st.one_of(
        st.booleans().map(lambda value: InferParameter(bool_param=value)),
        st.integers(-(2**63), 2**63 - 1).map(lambda value: InferParameter(int64_param=value)),
        st.text(max_size=300).map(lambda value: InferParameter(string_param=value)),
        st.floats().map(lambda value: InferParameter(double_param=value)),
        st.integers(0, 2**64 - 1).map(lambda value: InferParameter(uint64_param=value)),
        st.just(InferParameter()),
    ),
    max_size=2,
)
ROWS = st.sampled_from(tuple(DATATYPES.values()))
SHAPES = st.lists(st.integers(0, 4), max_size=3)


def elements_of(row: Datatype, count: int) -> st.SearchStrategy[list[Any]]:
    one: st.SearchStrategy[Any]
    if row is BYTES:
        one = st.binary(max_size=20)
    elif row.dtype.kind == "b":
        one = st.booleans()
    elif row.dtype.kind in "iu":
        limits = np.iinfo(row.dtype)
        one = st.integers(int(limits.min), int(limits.max))
    else:
        one = st.floats(width=64 if row.itemsize == 8 else 32)
    return st.lists(one, min_size=count, max_size=count)


@st.composite
def tensors(draw: st.DrawFn, typed: bool) -> tuple[Any, bytes]:
    """Make an input with its elements, and their raw form if they are not typed."""
    row = draw(ROWS)
    shape = draw(SHAPES)
    elements = draw(elements_of(row, int(np.prod(shape))))
    tensor = ModelInferRequestInferInputTensor(
        name=draw(st.text(max_size=5)), datatype=row.name, shape=shape, parameters=draw(PARAMETERS)
    )
    if typed and row.contents:
        tensor.contents = InferTensorContents(**{row.contents: elements})
    with np.errstate(over="ignore"):
        array = np.array(elements, dtype=row.dtype).reshape(-1)
    return tensor, bytes(to_bytes(row, array))


@st.composite
def requests(draw: st.DrawFn) -> Any:
    """Make a request as clients send them, mostly valid."""
    typed = draw(st.booleans())
    drawn = draw(st.lists(tensors(typed), max_size=3))
    raw = [] if typed else [content for _, content in drawn]
    if raw and draw(st.integers(0, 9)) == 0:
        raw[0] += b"\2"
    return ModelInferRequest(
        model_name=draw(st.text(max_size=5)),
        model_version=draw(st.sampled_from(["", "1"])),
        id=draw(st.text(max_size=200)),
        parameters=draw(PARAMETERS),
        inputs=[tensor for tensor, _ in drawn],
        outputs=[
            ModelInferRequestInferRequestedOutputTensor(name=name, parameters=draw(PARAMETERS))
            for name in draw(st.lists(st.text(max_size=3), max_size=2))
        ],
        raw_input_contents=raw,
    )


@given(message=requests())
@settings(max_examples=200)
def test_requests_are_read_as_the_generic_codec_reads_them(message: Any) -> None:
    data = WireCodec().encode_message(message)
    expected = outcome(generically(WireCodec()), data)

    for received in (data, memoryview(data), memoryview(bytearray(data)), data):
        assert expected == outcome(directly(WARM), received)


def test_contents_of_an_input_in_shared_memory_are_no_others() -> None:
    """Decoding agrees with the generic codec each time: the second input has no contents."""
    of = ModelInferRequestInferInputTensor
    region = {"shared_memory_region": InferParameter(string_param="r")}
    contents = InferTensorContents(fp32_contents=[1.0, 2.0])
    shared = of(name="a", datatype="FP32", shape=[2], parameters=region, contents=contents)
    bare = of(name="b", datatype="FP32", shape=[2])
    message = ModelInferRequest(model_name="m", inputs=[shared, bare])
    data, codec = WireCodec().encode_message(message), infer_codec()

    expected = outcome(generically(WireCodec()), data)
    assert [expected] * 5 == [outcome(directly(codec), data) for _ in range(5)]
    assert InvalidTensor in expected


@pytest.mark.parametrize("row", DATATYPES.values(), ids=DATATYPES)
@given(data=st.data())
@settings(max_examples=10)
def test_every_datatype_is_read_raw(row: Datatype, data: st.DataObject) -> None:
    """The array has the values and the shape that were sent."""
    elements = data.draw(elements_of(row, 6))
    with np.errstate(over="ignore"):
        array = np.array(elements, dtype=row.dtype).reshape(2, 3)

    (read,) = WARM.decode(raw_request(row.name, [2, 3], to_bytes(row, array))).request().inputs

    assert (row, array.dtype, (2, 3)) == (read.datatype, read.data.dtype, read.data.shape)
    assert bytes(to_bytes(row, array)) == bytes(to_bytes(row, read.data))


def raw_request(datatype: str, shape: list[int], *raw: Any, **values: Any) -> bytes:
    return WireCodec().encode_message(
        ModelInferRequest(
            model_name="m",
            inputs=[ModelInferRequestInferInputTensor(name="x", datatype=datatype, shape=shape)],
            raw_input_contents=list(raw),
            **values,
        )
    )


@pytest.mark.parametrize("row", [r for r in DATATYPES.values() if r.contents], ids=str)
@given(data=st.data())
@settings(max_examples=10)
def test_every_datatype_is_read_from_typed_contents(row: Datatype, data: st.DataObject) -> None:
    """As google's protobuf writes them, below and above the size of the fast path."""
    count = data.draw(st.sampled_from([1, 5, 200]))
    elements = data.draw(elements_of(row, 5)) * (count // 5) or data.draw(elements_of(row, 1))
    assert row.contents is not None
    request: Any = GOOGLE(ModelInferRequest)()
    tensor = request.inputs.add(name="x", datatype=row.name, shape=[count])
    getattr(tensor.contents, row.contents).extend(elements)

    (read,) = WARM.decode(request.SerializeToString()).request().inputs

    expected = np.empty(count, row.dtype)
    expected[:] = elements
    np.testing.assert_array_equal(expected, read.data, strict=True)


GOOGLE = Google()


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("FP32", [2], bytes(9)),
        ("FP32", [-1], bytes(4)),
        ("FP32", [1] * 65, bytes(4)),
        ("FP32", [0, 2**62, 4], b""),
        ("BOOL", [2], b"\1\2"),
        ("BYTES", [2], b"\1\0\0\0a"),
        ("FP99", [1], bytes(4)),
        ("", [], b""),
    ],
)
def test_faults_are_told_as_by_the_generic_codec(datatype: str, shape: Any, raw: bytes) -> None:
    data = raw_request(datatype, shape, raw)
    expected = outcome(generically(WireCodec()), data)

    assert "tensors" == expected[2]
    for _ in range(2):
        assert expected == outcome(directly(WARM), data)


def test_small_integers_out_of_range_are_refused() -> None:
    """UINT8 travels as uint32; larger values are not truncated."""
    data = typed_request("UINT8", [2], uint_contents=[0, 256])

    with pytest.raises(InvalidTensor, match="expected UINT8 between 0 and 255, got 256"):
        WARM.decode(data).request()


def test_one_bare_image_is_an_element() -> None:
    """OVMS clients send a single image without its length prefix."""
    image = b"\xff\xd8\xff\xe0" + bytes(20)

    (read,) = WARM.decode(raw_request("BYTES", [1], image)).request().inputs

    assert [image] == read.data.tolist()


def test_raw_tensors_are_views_of_the_message() -> None:
    received = bytearray(raw_request("FP32", [4], np.arange(4, dtype=np.float32)))

    (read,) = WARM.decode(memoryview(received)).request().inputs

    assert np.shares_memory(np.frombuffer(received, np.uint8), read.data)
    assert [0, 1, 2, 3] == read.data.tolist()


def test_a_refusal_has_no_other_one_behind_it() -> None:
    """A chained exception would keep the message and its partial contents alive."""
    for refused in (b"\x0a\x02\xff\xff", b"\x0a\x05"):
        with pytest.raises(MalformedMessage) as caught:
            WARM.decode(refused)
        assert caught.value.__context__ is caught.value.__cause__
    data = raw_request("FP32", [2], bytes(9))
    with pytest.raises(InvalidTensor) as faulty:
        WARM.decode(data).request()

    assert faulty.value.__context__ is faulty.value.__cause__


def test_a_request_can_be_read_twice() -> None:
    decoded = WARM.decode(raw_request("FP32", [1], bytes(4), id="7"))

    assert described(decoded.request()) == described(decoded.request())
    assert decoded.request() is not decoded.request()


# # --- known layouts -----------------------------------------------------------------------------


def typed_request(datatype: str, shape: list[int], **contents: Any) -> bytes:
    tensor = ModelInferRequestInferInputTensor(
        name="x", datatype=datatype, shape=shape, contents=InferTensorContents(**contents)
    )
    return WireCodec().encode_message(ModelInferRequest(model_name="m", inputs=[tensor]))


ORDINARY = {
    "raw": lambda n: raw_request("FP32", [1], np.float32(n).tobytes(), id=str(n)),
    "raw, other sizes": lambda n: raw_request("UINT8", [2], bytes((n, n)), id="a" * n),
    "raw bytes": lambda n: raw_request("BYTES", [1], (n).to_bytes(4, "little") + b"a" * n),
    "typed floats": lambda n: typed_request("FP64", [2], fp64_contents=[n, 0.5]),
    "typed integers": lambda n: typed_request("INT64", [70], int64_contents=[-n] * 70),
    "typed small integers": lambda n: typed_request("UINT8", [2], uint_contents=[n, 255]),
    "typed bytes": lambda n: typed_request("BYTES", [2], bytes_contents=[b"a" * n, b""]),
    "typed booleans": lambda n: typed_request("BOOL", [2], bool_contents=[bool(n % 2), True]),
    "parameters": lambda n: raw_request(
        "FP32",
        [1],
        np.float32(n).tobytes(),
        parameters={"p": InferParameter(int64_param=7)},
        outputs=[ModelInferRequestInferRequestedOutputTensor(name="y")],
    ),
}


@pytest.mark.parametrize("make", ORDINARY.values(), ids=ORDINARY)
@pytest.mark.parametrize("view", [bytes, memoryview])
def test_ordinary_requests_need_the_generic_codec_once(
    make: Any, view: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later requests differ from the first only in elements and id."""
    codec = infer_codec()
    messages = [make(n) for n in range(1, 9)]
    expected = [outcome(generically(WireCodec()), data) for data in messages]
    codec.decode(messages[0]).request()
    monkeypatch.delattr(WireCodec, "decode_message")

    assert expected == [outcome(directly(codec), view(data)) for data in messages]


def test_raw_requests_like_one_before_are_recognised() -> None:
    codec = infer_codec()
    first, second = (raw_request("FP32", [1, 2], bytes((n,)) * 8, id="a") for n in (1, 2))

    assert codec.recognise(first) is None
    codec.decode(first)
    one, other = codec.recognise(first), codec.recognise(second)
    assert one is not None
    assert other is not None
    assert one.form is other.form is not None
    assert bytes(8 * (2,)) == other.inputs[0].data.tobytes()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(ORDINARY["raw bytes"](3), id="elements to be decoded"),
        pytest.param(raw_request("BOOL", [1], b"\x01"), id="bytes that are no elements"),
        pytest.param(raw_request("FP32", [2], bytes(4)), id="too few elements"),
        pytest.param(b"\x0a", id="one byte"),
        pytest.param(b"", id="none"),
    ],
)
def test_what_has_to_be_decoded_is_not_recognised(data: bytes) -> None:
    codec = infer_codec()
    with contextlib.suppress(MalformedMessage):
        codec.decode(data)

    assert codec.recognise(data) is None


def test_an_id_that_is_not_unicode_is_not_recognised() -> None:
    codec = infer_codec()
    data = raw_request("FP32", [1], bytes(4), id="4711")
    codec.decode(data)

    assert codec.recognise(data.replace(b"4711", b"471\xff")) is None


def test_models_with_names_of_the_same_length_are_told_apart() -> None:
    codec = infer_codec()
    one = raw_request("FP32", [1], bytes(4))
    other = one.replace(b"\x0a\x01m", b"\x0a\x01n")

    assert ["m", "n"] * 2 == [codec.decode(data).model_name for data in (one, other) * 2]


@pytest.mark.parametrize("old", [b"FP32", b"x", b"\x1a\x01\x01", b"\x3a\x04"])
def test_what_differs_in_its_structure_is_not_taken_for_the_same(old: bytes) -> None:
    """Requests of the same size, with the same model name."""
    codec = infer_codec()
    data = raw_request("FP32", [1], bytes(4))
    assert 1 == data.count(old)
    codec.decode(data)

    for at in range(len(old)):
        changed = bytearray(old)
        changed[at] ^= 1
        damaged = data.replace(old, bytes(changed))
        assert outcome(generically(WireCodec()), damaged) == outcome(directly(codec), damaged)


def test_id_of_a_known_request_is_checked() -> None:
    codec = infer_codec()
    data = raw_request("FP32", [1], bytes(4), id="4711")
    assert "4711" == codec.decode(data).id

    assert "4712" == codec.decode(data.replace(b"4711", b"4712")).id
    with pytest.raises(MalformedMessage):
        codec.decode(data.replace(b"4711", b"471\xff"))


def test_nothing_that_is_kept_can_be_changed() -> None:
    """Requests share their common parts, which are immutable."""
    request = WARM.decode(ORDINARY["parameters"](1)).request()

    for shared in (request, request.inputs[0], request.outputs[0]):
        with pytest.raises(TypeError, match="does not support item assignment"):
            shared.parameters["p"] = 1  # type: ignore[index]


@given(count=st.integers(1, 100))
@settings(max_examples=10)
def test_no_cache_grows_beyond_its_bound(count: int) -> None:
    decoder = InferDecoder(max_fields=1000, max_depth=100, max_cached=16)
    for n in range(count):
        name = f"output {n}"
        decoder.decode(
            raw_request(
                "FP32",
                [n + 1],
                bytes(4 * n + 4),
                parameters={name: InferParameter(int64_param=n)},
                outputs=[ModelInferRequestInferRequestedOutputTensor(name=name)],
            )
        )

    caches = [cache for cache in vars(decoder).values() if isinstance(cache, BoundedCache)]
    assert 4 == len(caches)
    assert all(0 < len(cache) <= 16 for cache in caches)


def test_long_keys_are_not_kept() -> None:
    decoder = InferDecoder(max_fields=1000, max_depth=100, max_cached=16)
    for data in (
        raw_request(
            "FP32", [1], bytes(4), parameters={"a" * 1025: InferParameter(bool_param=True)}
        ),
        raw_request("FP32", [1], bytes(4), model_version="a" * 1025),
        typed_request("BYTES", [1], bytes_contents=[b"a" * 1025]),
    ):
        assert outcome(generically(WireCodec()), data) == outcome(directly(decoder), data)

    keys = [k for c in vars(decoder).values() if isinstance(c, BoundedCache) for k in c]
    assert all(len(repr(key)) < 1024 for key in keys)


# --- bounds ------------------------------------------------------------------------------------


@given(message=requests(), limit=st.integers(0, 60))
@settings(max_examples=100)
def test_fields_are_bounded_as_by_the_generic_codec(message: Any, limit: int) -> None:
    data = WireCodec().encode_message(message)
    expected = outcome(generically(WireCodec(max_fields=limit)), data)

    codec = InferCodec(max_fields=limit, max_depth=100)

    assert expected == outcome(directly(codec), data)
    assert expected == outcome(directly(codec), data)


@pytest.mark.parametrize("depth", range(5))
@given(message=requests())
@settings(max_examples=20)
def test_depth_is_bounded_as_by_the_generic_codec(depth: int, message: Any) -> None:
    data = WireCodec().encode_message(message)
    expected = outcome(generically(WireCodec(max_depth=depth)), data)

    assert expected == outcome(directly(InferCodec(max_fields=1000, max_depth=depth)), data)


BOMBS = {
    "raw contents": b"\x3a\x00",
    "inputs": b"\x2a\x00",
    "outputs": b"\x32\x00",
    "parameters": b"\x22\x04\x12\x02\x08\x01",
    "ids": b"\x1a\x00",
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_messages_of_many_small_fields_are_refused(bomb: bytes) -> None:
    with pytest.raises(TooManyFields):
        WARM.decode(bomb * 200_000)


def test_large_typed_contents_are_within_the_default_bounds() -> None:
    """A hundred thousand numbers are one field, whatever their values."""
    data = typed_request("INT64", [100_000], int64_contents=[-1] * 100_000)

    (read,) = WARM.decode(data).request().inputs

    assert (read.data == -1).all()


@given(messages=st.lists(requests(), max_size=8))
@settings(max_examples=25)
def test_a_small_cache_changes_nothing(messages: list[Any]) -> None:
    codec, wire = infer_codec(max_cached=1), WireCodec()
    for data in map(wire.encode_message, messages):
        assert outcome(generically(wire), data) == outcome(directly(codec), data)


# --- responses ---------------------------------------------------------------------------------


@st.composite
def arrays(draw: st.DrawFn, row: Datatype) -> Any:
    """Make an array of any layout: zero-dimensional, empty, transposed, strided."""
    shape = draw(SHAPES)
    elements = draw(elements_of(row, int(np.prod(shape))))
    with np.errstate(over="ignore"):
        flat = np.empty(len(elements), row.dtype)
        flat[:] = elements
    array = flat.reshape(shape)
    if draw(st.booleans()):
        array = array.T
    return array[::2] if array.ndim and draw(st.booleans()) else array


@st.composite
def responses(draw: st.DrawFn) -> InferResponse:
    rows = draw(st.lists(ROWS, max_size=3))
    return InferResponse(
        model_name=draw(st.text(max_size=5)),
        model_version=draw(st.sampled_from(["", "1"])),
        id=draw(st.text(max_size=200)),
        outputs=tuple(
            InferOutput(draw(st.text(max_size=5)), row, draw(arrays(row))) for row in rows
        ),
    )


def generic_bytes(response: InferResponse, form: Form | None = None) -> bytes:
    outputs, raw = write_outputs(response.outputs, form)
    return WireCodec().encode_message(
        ModelInferResponse(
            model_name=response.model_name,
            model_version=response.model_version,
            id=response.id,
            outputs=outputs,
            raw_output_contents=raw,
        )
    )


@given(response=responses())
@settings(max_examples=150)
def test_responses_are_written_as_the_generic_codec_writes_them(response: InferResponse) -> None:
    expected = generic_bytes(response)

    for _ in range(2):
        parts, size = WARM.encode(response)
        assert (expected, len(expected)) == (b"".join(parts), size)


@given(response=responses(), form=st.sampled_from(TypedAnswerForm))
@settings(max_examples=100)
def test_typed_responses_are_written_as_the_generic_codec_writes_them(
    response: InferResponse, form: TypedAnswerForm
) -> None:
    typed = TypedAnswers(form)
    expected = generic_bytes(response, typed.write(response.outputs))
    codec = InferCodec(max_fields=100_000, max_depth=100, typed=typed)

    parts, size = codec.encode_typed(response)

    assert (expected, len(expected)) == (b"".join(parts), size)


@pytest.mark.parametrize("form", [TypedAnswerForm.BOTH, TypedAnswerForm.TYPED])
def test_outputs_without_a_typed_field_are_raw_and_the_others_beside_them(
    form: TypedAnswerForm,
) -> None:
    """Raw contents pair with all outputs by position (V2 protocol, ModelInferResponse)."""
    half, full = (
        InferOutput(n, DATATYPES[n], np.ones(2, DATATYPES[n].dtype)) for n in ("FP16", "FP32")
    )
    typed = TypedAnswers(form)

    assert (None, True) == (typed.write([half]).contents[0], typed.write([half]).raw)
    none, contents = typed.write([half, full]).contents
    assert (None, [1.0, 1.0]) == (none, contents and contents.fp32_contents)
    assert typed.write([half, full]).raw
    assert (form is TypedAnswerForm.BOTH) is typed.write([full]).raw


@given(response=responses())
@settings(max_examples=50)
def test_google_reads_what_is_written(response: InferResponse) -> None:
    written = b"".join(WARM.encode(response)[0])

    theirs: Any = GOOGLE(ModelInferResponse).FromString(written)
    assert (response.model_name, response.id) == (theirs.model_name, theirs.id)
    assert [tuple(o.shape) for o in theirs.outputs] == [o.data.shape for o in response.outputs]
    assert [bytes(to_bytes(o.datatype, o.data)) for o in response.outputs] == list(
        theirs.raw_output_contents
    )


def large_response(*outputs: Any) -> InferResponse:
    row = DATATYPES["FP32"]
    return InferResponse(
        "m", "1", "", tuple(InferOutput(str(i), row, out) for i, out in enumerate(outputs))
    )


def test_large_tensors_are_parts_of_their_own_and_not_copied() -> None:
    large = np.arange(JOINED_BYTES, dtype=np.float32)
    small = np.ones(3, np.float32)
    response = large_response(small, large, large, small)

    parts, size = WARM.encode(response)

    assert [False, True, False, True, False] == [type(part) is memoryview for part in parts]
    assert np.shares_memory(large, np.frombuffer(parts[1], np.uint8))
    assert (generic_bytes(response), size) == (b"".join(parts), sum(map(len, parts)))


def test_large_tensors_with_gaps_are_written_in_order() -> None:
    response = large_response(np.arange(2 * JOINED_BYTES, dtype=np.float32).reshape(2, -1).T)

    assert generic_bytes(response) == b"".join(WARM.encode(response)[0])


def test_a_small_response_is_one_part() -> None:
    parts, _ = WARM.encode(large_response(np.ones(3, np.float32), np.ones((), np.float32)))

    assert [bytes] == list(map(type, parts))


def test_names_that_are_not_unicode_are_refused() -> None:
    for response in (InferResponse("\ud800", "", "", ()), InferResponse("m", "", "\ud800", ())):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            WARM.encode(response)


# # --- position of a tensor in the message -------------------------------------------------------


@given(message=requests())
def test_offset_is_where_the_first_raw_tensor_starts(message: Any) -> None:
    data = WireCodec().encode_message(message)
    raw = WireCodec().decode_message(ModelInferRequest, data).raw_input_contents
    start = np.frombuffer(data, np.uint8).ctypes.data
    first = np.frombuffer(raw[0] if raw else b"", np.uint8)
    expected = first.ctypes.data - start if first.size else 0

    found = tensor_offset(memoryview(data), len(data))

    assert expected == (found if expected else 0)


def test_offset_is_found_in_the_first_bytes() -> None:
    data = raw_request("FP32", [1, 3, 224, 224], bytes(4 * 3 * 224 * 224))

    offset = tensor_offset(memoryview(data)[:100], len(data))

    assert len(data) - 4 * 3 * 224 * 224 == offset
    assert 0 == tensor_offset(memoryview(data)[: offset - 1], len(data))
    assert 0 == tensor_offset(memoryview(data)[:100], len(data) - 1)


@given(data=st.binary(max_size=100), size=st.integers(0, 2**32))
def test_offset_of_anything_else_is_0_or_within_the_message(data: bytes, size: int) -> None:
    assert 0 <= tensor_offset(memoryview(data), size) <= size


ONE_OUTPUT = InferResponse(
    "m", "1", "", (InferOutput("y", DATATYPES["FP32"], np.ones(2, np.float32)),)
)


@given(response=responses(), placed=st.lists(st.booleans(), min_size=3, max_size=3))
@example(response=ONE_OUTPUT, placed=[True] * 3)
@settings(max_examples=60)
def test_outputs_in_shared_memory_are_written_as_the_generic_codec_writes_them(
    response: InferResponse, placed: list[bool]
) -> None:
    outputs = tuple(
        PlacedOutput(output.name, output.datatype, output.data) if is_placed else output
        for output, is_placed in zip(response.outputs, placed, strict=False)
    )
    detailed = DetailedResponse(response.model_name, response.model_version, response.id, outputs)
    expected = generic_bytes(detailed)

    for _ in range(2):
        parts, size = WARM.encode(detailed)
        assert (expected, len(expected)) == (b"".join(parts), size)
