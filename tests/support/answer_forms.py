"""Request forms over gRPC and HTTP that decide what form the answer has.

Each row here is one property of a request that changes its answer. The server's fast paths remember
requests of one form, so tests repeat each form with other values and ids and compare every answer
with the first.
"""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import gzip
import itertools
import json
import random
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb

from support import identity_models
from support.answer_models import LABELS, MODELS, Model
from support.http import chunked
from xlaserve.tensors import BYTES, DATATYPES, Datatype, Tensor, from_bytes, from_elements, to_bytes

LENGTH = "Inference-Header-Content-Length"
REGION, REGION_BYTES = "forms", 1 << 19
ORIGIN = "https://app.example"
"""The origin that CORS allows."""
OUT_OFFSET = 1024
"""Offset of outputs in the shared memory region; inputs are at its start."""
PAIRS = 24
"""Number of property pairs to test, drawn from the seed."""
MANY = 5000
"""Elements of a tensor long enough to be read and written on a thread."""
LONG = {"BOOL", "INT64", "FP32", "BYTES"}
"""Datatypes that are also tested with long tensors: one per way of reading them."""


def write_models(root: Path) -> None:
    """Write an identity model for each datatype, and the two-input models of `answer_models`."""
    for row in DATATYPES.values():
        identity_models.write(root, row.name, row.name)
    for model in MODELS:
        model.write(root)


# --- Requests and expected answers ---------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One request of a form, and its expected answer."""

    values: Mapping[str, Tensor]
    """Value of each input, which the corresponding output must return."""
    id: str = ""
    message: Any = None
    """The gRPC request message."""
    metadata: tuple[tuple[str, str], ...] = ()
    compression: Any = None
    has_final: bool = False
    """Whether a stream may end with an additional final answer without tensors."""
    is_batched: bool = True
    """Whether the tensors have a batch dimension; otherwise classification covers all elements."""
    timeout: float = 60.0
    path: str = ""
    """Path of the HTTP request; the fields below are HTTP's as well."""
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    chunks: bool = False
    """Whether the body is sent in chunks, without Content-Length."""


@dataclass(frozen=True)
class Form:
    """A form of request; requests of one form differ only in values and ids."""

    name: str
    ask: Callable[[int], Asked]
    """Makes the request with a given number."""
    own_engine_only: bool = False
    """Whether grpclib with h2 lacks support for it (compressed messages)."""
    streams_only: bool = False
    """Whether the model is decoupled, so that only streams can ask it."""
    times: int = 5
    """How many requests to send."""


OTHERS = [one for one in MODELS if one.name != "pair"]
"""Models that a property of a request selects."""
OUTPUT_OF = {"x": "a", "z": "b"}
Answer: TypeAlias = Mapping[str, Any]
Change: TypeAlias = Callable[[Asked, int], Asked]


def values_of(row: Datatype, number: int, shape: tuple[int, ...]) -> Tensor:
    """Return different values for numbers modulo three; every third request has the same bytes."""
    kind, count, start = row.dtype.kind, int(np.prod(shape)), 1 + number % 3
    if row is BYTES:
        found = np.array([f"t\u00e4xt {start}.{at}".encode() for at in range(count)], np.object_)
    elif kind == "b":
        found = np.array([(at + start) % 2 == 0 for at in range(count)], np.bool_)
    else:
        found = np.arange(start, start + count).astype(row.dtype)
    return found.reshape(shape)


def _two(number: int, rows: int = 1) -> dict[str, Tensor]:
    row = DATATYPES["FP32"]
    return {"x": values_of(row, number, (rows, 2)), "z": values_of(row, number + 1, (rows, 2)) * 2}


# --- gRPC --------------------------------------------------------------------------------------


def _message(model: str, values: Mapping[str, Tensor], row: Datatype, *, typed: bool) -> Any:
    request = pb.ModelInferRequest(model_name=model)
    for name, data in values.items():
        tensor = request.inputs.add(name=name, datatype=row.name, shape=list(data.shape))
        if typed:
            assert row.contents is not None
            getattr(tensor.contents, row.contents).extend(data.ravel().tolist())
        else:
            request.raw_input_contents.append(bytes(to_bytes(row, data)))
    return request


def _pair(number: int, *, typed: bool, model: str = "pair", rows: int = 1) -> Asked:
    values = _two(number, rows)
    return Asked(values, message=_message(model, values, DATATYPES["FP32"], typed=typed))


def _named(asked: Asked, number: int) -> Asked:
    asked.message.id = f"r{number}"
    return replace(asked, id=f"r{number}")


def _choosing(*names: str, **parameters: Any) -> Callable[[Asked, int], Asked]:
    def change(asked: Asked, number: int) -> Asked:
        for name in names:
            output = asked.message.outputs.add(name=name)
            for key, value in parameters.items():
                _set(output.parameters[key], value)
        return asked

    return change


def _set(parameter: Any, value: Any) -> None:
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
    setattr(parameter, kinds[type(value)], value)


def _saying(**parameters: Any) -> Callable[[Asked, int], Asked]:
    def change(asked: Asked, number: int) -> Asked:
        for key, value in parameters.items():
            _set(asked.message.parameters[key], value)
        return asked

    return change


def _of_version(asked: Asked, number: int) -> Asked:
    asked.message.model_version = "1"
    return asked


_sequences = itertools.count(1)


def _of_model(model: Model) -> Change:
    def change(asked: Asked, number: int) -> Asked:
        asked.message.model_name = model.name
        if model.of_sequences:
            one = {"sequence_start": True, "sequence_end": True}
            _saying(sequence_id=next(_sequences), **one)(asked, number)
        return replace(asked, is_batched=not model.many)

    return change


def _turned_inputs(asked: Asked, number: int) -> Asked:
    request = asked.message
    for field_of in (request.inputs, request.raw_input_contents):
        turned = list(field_of)[::-1]
        del field_of[:]
        field_of.extend(turned)
    return asked


def _said_of_inputs(asked: Asked, number: int) -> Asked:
    for tensor in asked.message.inputs:
        _set(tensor.parameters["mine"], "yes")
    return asked


def _of_later(asked: Asked, number: int) -> Asked:
    """Add a field that is unknown to every version of the contract."""
    asked.message.MergeFromString(b"\xa2\x06\x03new")
    return asked


def _empty_final(asked: Asked, number: int) -> Asked:
    _saying(triton_enable_empty_final_response=True)(asked, number)
    return replace(asked, has_final=True)


def _of_kind(kind: str, value: float) -> Change:
    def change(asked: Asked, number: int) -> Asked:
        setattr(asked.message.parameters["mine"], kind, value)
        return asked

    return change


def _misnamed(asked: Asked, number: int) -> Asked:
    asked.message.inputs[0].name = "w"
    return asked


def _placed_output(asked: Asked, number: int) -> Asked:
    places = {"shared_memory_region": REGION, "shared_memory_byte_size": 32}
    _choosing("a", **places, shared_memory_offset=OUT_OFFSET)(asked, number)
    return _choosing("b")(asked, number)


def _with(**options: Any) -> Callable[[Asked, int], Asked]:
    return lambda asked, number: replace(asked, **options)


GRPC: Mapping[str, Change] = {
    "id": _named,
    "version": _of_version,
    "first output": _choosing("a"),
    "last output": _choosing("b"),
    "outputs turned": _choosing("b", "a"),
    "classes": _choosing("a", "b", classification=1),
    "output in shared memory": _placed_output,
    "binary_data over gRPC": _choosing("a", "b", binary_data=True),
    "inputs turned": _turned_inputs,
    "parameters of inputs": _said_of_inputs,
    "a field of later": _of_later,
    "parameter of one's own": _saying(mine="yes"),
    "a number of one's own": _of_kind("double_param", 0.5),
    "a number without a sign": _of_kind("uint64_param", 1 << 63),
    "priority": _saying(priority=1),
    "timeout": _saying(timeout=60_000_000),
    "sequence": _saying(sequence_id=7, sequence_start=True, sequence_end=True),
    "empty final": _empty_final,
    "binary_data_output over gRPC": _saying(binary_data_output=True),
    **{one.says: _of_model(one) for one in OTHERS},
    "deadline": _with(timeout=40.0),
    "headers": lambda asked, number: replace(asked, metadata=(("x-request-id", f"n{number}"),)),
    "gzip": _with(compression=grpc.Compression.Gzip),
    "deflate": _with(compression=grpc.Compression.Deflate),
    "no such output": _choosing("c"),
    "no such input": _misnamed,
    "no such version": lambda asked, number: _version_of(asked, "7"),
}
"""Request properties over gRPC."""
_APART = (
    {"first output", "last output", "outputs turned", "classes", "output in shared memory"}
    | {"binary_data over gRPC", "no such output"},
    {one.says for one in OTHERS} | {"no such version"},
    {"gzip", "deflate"},
    {"version", "no such version"},
    {"priority", "sequence", "sequences", "timeout"},
    {"parameter of one's own", "a number of one's own", "a number without a sign"},
)
"""Mutually exclusive properties."""


_OF_ANSWERS = (
    "first output",
    "last output",
    "outputs turned",
    "classes",
    "output in shared memory",
    "inputs turned",
    "id",
    "no such output",
)
_OF_MODELS = [(one.says, name) for one in OTHERS for name in _OF_ANSWERS]
"""Properties that decide the form of an answer, for each model."""
_MANY = {one.says for one in MODELS if one.many}


def _version_of(asked: Asked, version: str) -> Asked:
    asked.message.model_version = version
    return asked


def grpc_forms(seed: int) -> list[Form]:
    """Return the gRPC forms: for each datatype, each property, and pairs of properties."""
    forms = []
    for row in DATATYPES.values():
        for typed in (False, True) if row.contents else (False,):
            name = f"{row.name} {'typed' if typed else 'raw'}"
            forms.append(Form(name, _of_datatype(row, typed=typed)))
            if row.name in LONG:
                forms.append(Form(f"{name} & long", _of_datatype(row, typed=typed, count=MANY)))
    singles = [(name,) for name in GRPC]
    for chosen in dict.fromkeys([(), *singles, *_pairs(GRPC, _APART, seed)]):
        forms += [_form(chosen, typed=typed) for typed in (False, True)]
    for number, pair in enumerate(_OF_MODELS):
        forms.append(_form(pair, typed=bool(number % 2), times=3))
    for typed in (False, True):
        for rows in (2, 4, 5):
            name = f"{'typed' if typed else 'raw'} of {rows} rows"
            forms.append(Form(name, partial(_pair, typed=typed, rows=rows)))
        for offset in IN_REGION:
            name = f"input in shared memory at {offset}, contents {typed}"
            forms.append(Form(name, partial(_placed, typed=typed, offset=offset)))
    forms.append(Form("raw, a long input in shared memory", _placed_long))
    return forms


def _form(chosen: Sequence[str], *, typed: bool, times: int = 5) -> Form:
    return Form(
        " & ".join(["typed" if typed else "raw", *chosen]),
        _changed(chosen, typed=typed),
        own_engine_only=not {"gzip", "deflate"}.isdisjoint(chosen),
        streams_only=not _MANY.isdisjoint(chosen),
        times=times,
    )


def _of_datatype(row: Datatype, *, typed: bool, count: int = 3) -> Callable[[int], Asked]:
    def ask(number: int) -> Asked:
        values = {"x": values_of(row, number, (count,))}
        return Asked(values, message=_message(row.name, values, row, typed=typed))

    return ask


def _changed(chosen: Sequence[str], *, typed: bool) -> Callable[[int], Asked]:
    def ask(number: int) -> Asked:
        asked = _pair(number, typed=typed)
        for name in chosen:
            asked = GRPC[name](asked, number)
        return asked

    return ask


def _placed(number: int, *, typed: bool, offset: int) -> Asked:
    """Put one input, with constant bytes, in shared memory and the other in the message."""
    asked = _pair(number, typed=typed)
    request, (first, _) = asked.message, asked.message.inputs
    first.ClearField("contents")
    if not typed:
        del request.raw_input_contents[0]
    _set(first.parameters["shared_memory_region"], REGION)
    _set(first.parameters["shared_memory_byte_size"], 8)
    if offset:
        _set(first.parameters["shared_memory_offset"], offset)
    return replace(asked, values={**asked.values, "x": IN_REGION[offset]})


def _placed_long(number: int) -> Asked:
    """Put an input in shared memory that is long enough to be read on a thread."""
    request = pb.ModelInferRequest(model_name="FP32", id=f"r{number}")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=list(LONG_IN_REGION.shape))
    _set(tensor.parameters["shared_memory_region"], REGION)
    _set(tensor.parameters["shared_memory_byte_size"], LONG_IN_REGION.nbytes)
    _set(tensor.parameters["shared_memory_offset"], LONG_OFFSET)
    return Asked({"x": LONG_IN_REGION}, f"r{number}", request)


LONG_OFFSET = 4096
LONG_IN_REGION = np.arange(80_000, dtype=np.float32)
"""Data at that offset of the region, too long to be read on the event loop."""
IN_REGION = {at: np.array([[31.0, 32.0 + at]], np.float32) for at in (0, 8)}
"""Data in the region, by offset."""


def _pairs(
    table: Iterable[str], apart: Iterable[Collection[str]], seed: int
) -> list[tuple[str, str]]:
    pairs = [
        pair
        for pair in itertools.combinations(table, 2)
        if not any(len({*group}.intersection(pair)) > 1 for group in apart)
    ]
    return random.Random(seed).sample(pairs, PAIRS)


def answer_of_grpc(asked: Asked, found: bytes | grpc.aio.AioRpcError) -> Answer:
    """Normalize an answer: remove everything that may differ between requests of a form.

    Values that are not the expected ones are kept, so that comparing answers fails.
    """
    if isinstance(found, grpc.aio.AioRpcError):
        return {"status": found.code().name, "text": found.details()}
    return _answer(asked, pb.ModelInferResponse.FromString(found))


def answer_of_stream(asked: Asked, found: Sequence[bytes]) -> Answer:
    """Normalize the first answer of a stream; the others must have no tensors."""
    first, *rest = map(pb.ModelStreamInferResponse.FromString, found)
    others = [one for one in rest if one.error_message or one.infer_response.outputs]
    if others or not (first.error_message or asked.has_final or not rest):
        return {"too many": str(others or rest)}
    marked = [one.infer_response.parameters.pop(FINAL).bool_param for one in (first, *rest)]
    if True in marked[:-1]:
        return {"behind the last": marked}
    if first.error_message:
        return {"text": first.error_message}
    return _answer(asked, first.infer_response)


FINAL = "triton_final_response"


def _answer(asked: Asked, message: Any) -> Answer:
    raw = list(message.raw_output_contents)
    outputs = []
    for at, output in enumerate(message.outputs):
        row = DATATYPES[output.datatype]
        forms: dict[str, Any] = {}
        filled = {field.name for field, _ in output.contents.ListFields()}
        for name in filled:
            elements = list(getattr(output.contents, name))
            forms[name] = _as_sent(asked, output.name, from_elements(row, output.shape, elements))
        if raw and raw[at]:
            forms["raw"] = _as_sent(asked, output.name, from_bytes(row, output.shape, raw[at]))
        outputs.append((output.name, output.datatype, list(output.shape), forms))
    return {
        "model": (message.model_name, message.model_version),
        "id": message.id == asked.id or message.id,
        "parameters": sorted(message.parameters),
        "outputs": outputs,
        "raw": len(raw),
    }


def _as_sent(asked: Asked, output: str, tensor: Tensor) -> Any:
    """Return True if an output has the values sent, or their top class; else return its repr."""
    inputs = {OUTPUT_OF.get(name, "y"): data for name, data in asked.values.items()}
    if len(asked.values) == 1:
        inputs["y"] = next(iter(asked.values.values()))
    wanted = inputs[output]
    if tensor.dtype == np.object_ and wanted.dtype != np.object_:
        wanted = np.array([[_best(scores)] for scores in wanted], np.object_)
        wanted = wanted if asked.is_batched else wanted[0]
    same = tensor.shape == wanted.shape and tensor.dtype == wanted.dtype
    return bool(same and (tensor == wanted).all()) or repr(tensor)


def _best(scores: Tensor) -> bytes:
    index = int(np.argmax(scores))
    return f"{scores[index]:f}:{index}:{LABELS[index]}".encode()


# --- HTTP --------------------------------------------------------------------------------------


@dataclass
class _Draft:
    """An HTTP request under construction."""

    model: str
    values: Mapping[str, Tensor]
    row: Datatype = DATATYPES["FP32"]
    binary: bool = False
    """Whether inputs are sent in binary."""
    suffix: str = "/infer"
    version: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    headers: list[tuple[str, str]] = field(default_factory=list)
    coding: Callable[[bytes], bytes] | None = None
    placed: int | None = None
    """Offset of the first input in the region; None if the input is in the request."""
    turned: bool = False
    """Whether the inputs are in reverse order."""
    of_inputs: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of each input."""
    fields_first: bool = False
    """Whether the JSON field `inputs` comes last."""
    chunks: bool = False

    def asked(self) -> Asked:
        inputs, tail = [], b""
        first = next(iter(self.values))
        for name, data in sorted(self.values.items(), reverse=self.turned):
            tensor = {"name": name, "datatype": self.row.name, "shape": list(data.shape)}
            said = dict(self.of_inputs)
            if self.placed is not None and name == first:
                said |= {"shared_memory_region": REGION, "shared_memory_byte_size": 8}
                said |= {"shared_memory_offset": self.placed} if self.placed else {}
            elif self.binary:
                raw = bytes(to_bytes(self.row, data))
                said["binary_data_size"] = len(raw)
                tail += raw
            else:
                tensor["data"] = _listed(data)
            inputs.append({**tensor, "parameters": said} if said else tensor)
        whole = {"inputs": inputs, **self.fields}
        if self.fields_first:
            whole = {**self.fields, "inputs": inputs}
        body = json.dumps(whole).encode()
        headers = [*self.headers]
        if self.binary:
            headers.append((LENGTH, str(len(body))))
        body += tail
        if self.coding is not None:
            body = self.coding(body)
        if self.chunks:
            body = chunked(body[:50], body[50:])
            headers.append(("Transfer-Encoding", "chunked"))
        path = f"/v2/models/{self.model}{self.version}{self.suffix}"
        values = dict(self.values)
        if self.placed is not None:
            values[first] = IN_REGION[self.placed]
        identity = self.fields.get("id", "")
        return Asked(
            values, id=identity, path=path, headers=tuple(headers), body=body, chunks=self.chunks
        )


def _listed(data: Tensor) -> list[Any]:
    flat = data.ravel().tolist()
    return [one.decode() if isinstance(one, bytes) else one for one in flat]


Drawn: TypeAlias = Callable[[_Draft, int], None]


def _wanting(*names: str, **parameters: Any) -> Drawn:
    def change(draft: _Draft, number: int) -> None:
        outputs = [{"name": name, "parameters": parameters} for name in names]
        draft.fields.setdefault("outputs", []).extend(outputs)

    return change


def _said(**parameters: Any) -> Drawn:
    def change(draft: _Draft, number: int) -> None:
        draft.fields["parameters"] = {**draft.fields.get("parameters", {}), **parameters}

    return change


def _header(name: str, value: str) -> Drawn:
    return lambda draft, number: draft.headers.append((name, value.format(number=number)))


def _attribute(name: str, value: Any) -> Drawn:
    return lambda draft, number: setattr(draft, name, value)


def _one_binary(draft: _Draft, number: int) -> None:
    _wanting("a", binary_data=True)(draft, number)
    _wanting("b", binary_data=False)(draft, number)


def _for_model(model: Model) -> Drawn:
    def change(draft: _Draft, number: int) -> None:
        draft.model = model.name
        if model.of_sequences:
            one = {"sequence_start": True, "sequence_end": True}
            _said(sequence_id=next(_sequences), **one)(draft, number)

    return change


def _coded(name: str, coding: Callable[[bytes], bytes]) -> Drawn:
    def change(draft: _Draft, number: int) -> None:
        draft.coding = coding
        draft.headers.append(("Content-Encoding", name))

    return change


def _in_region(draft: _Draft, number: int) -> None:
    places = {"shared_memory_region": REGION, "shared_memory_byte_size": 32}
    _wanting("a", **places, shared_memory_offset=OUT_OFFSET)(draft, number)
    _wanting("b")(draft, number)


HTTP: Mapping[str, Drawn] = {
    "id": lambda draft, number: draft.fields.update(id=f"r{number}"),
    "version": _attribute("version", "/versions/1"),
    "binary inputs": _attribute("binary", True),
    "binary_data_output": _said(binary_data_output=True),
    "first output": _wanting("a"),
    "outputs turned": _wanting("b", "a"),
    "binary outputs": _wanting("a", "b", binary_data=True),
    "one output binary": _one_binary,
    "classes": _wanting("a", "b", classification=1),
    "binary classes": _wanting("a", "b", classification=1, binary_data=True),
    "output in shared memory": _in_region,
    "input in shared memory": _attribute("placed", 0),
    "input behind another in shared memory": _attribute("placed", 8),
    "parameter of one's own": _said(mine="yes"),
    "empty final": _said(triton_enable_empty_final_response=True),
    "priority": _said(priority=1),
    "timeout": _said(timeout=60_000_000),
    "sequence": _said(sequence_id=7, sequence_start=True, sequence_end=True),
    **{one.says: _for_model(one) for one in OTHERS if not one.many},
    "inputs turned": _attribute("turned", True),
    "parameters of inputs": _attribute("of_inputs", {"mine": "yes"}),
    "a field of later": lambda draft, number: draft.fields.update(new=[1, {"inputs": []}]),
    "fields turned": _attribute("fields_first", True),
    "body in chunks": _attribute("chunks", True),
    "content type": _header("Content-Type", "application/json; charset=utf-8"),
    "octets": _header("Content-Type", "application/octet-stream"),
    "of a page": _header("Origin", ORIGIN),
    "query": _attribute("suffix", "/infer?a=b"),
    "request id": _header("X-Request-Id", "n{number}"),
    "trace": _header(
        "traceparent", "00-4bf92f3577b34da6a3ce929d0e0e{number:04x}-00f067aa0ba902b7-01"
    ),
    "accepts JSON": _header("Accept", "application/json"),
    "accepts events": _header("Accept", "text/event-stream"),
    "accepts gzip": _header("Accept-Encoding", "gzip"),
    "gzip body": _coded("gzip", gzip.compress),
    "deflate body": _coded("deflate", zlib.compress),
    "no such output": _wanting("c"),
    "no such version": _attribute("version", "/versions/7"),
}
"""Request properties over HTTP."""
_HTTP_APART = (
    {"first output", "outputs turned", "binary outputs", "one output binary", "classes"}
    | {"binary classes", "output in shared memory", "no such output"},
    {one.says for one in OTHERS} | {"no such version"},
    {"gzip body", "deflate body"},
    {"version", "no such version"},
    {"accepts JSON", "accepts events"},
    {"content type", "octets"},
    {"input in shared memory", "input behind another in shared memory"},
)


def http_forms(seed: int) -> list[Form]:
    """Return the HTTP forms."""
    forms = []
    for row in DATATYPES.values():
        for binary in (False, True) if row.contents else (True,):
            for answer in (False, True) if row.contents else (True,):
                name = f"{row.name}, binary {binary} and {answer}"
                forms.append(Form(name, _datatype_over_http(row, binary=binary, answer=answer)))
    for name, accepted in (("gzip", "gzip"), ("deflate", "deflate"), ("identity", "identity")):
        forms.append(Form(f"long, {name}", _long(accepted)))
    for name in sorted(LONG):
        for binary in (False, True):
            form = _datatype_over_http(DATATYPES[name], binary=binary, answer=binary, count=20_000)
            forms.append(Form(f"{name}, long, binary {binary}", form))
    forms.append(Form("the body is the tensor", _bare))
    singles = [(name,) for name in HTTP]
    of_models = [pair for pair in _OF_MODELS if _MANY.isdisjoint(pair) and {*pair} <= {*HTTP}]
    pairs = _pairs(HTTP, _HTTP_APART, seed)
    for chosen in dict.fromkeys([(), *singles, *pairs]):
        forms.append(Form(" & ".join(chosen) or "plain", _drawn(chosen)))
    for pair in of_models:
        forms.append(Form(" & ".join(pair), _drawn(pair), times=3))
    return forms


def _drawn(chosen: Sequence[str]) -> Callable[[int], Asked]:
    def ask(number: int) -> Asked:
        draft = _Draft("pair", _two(number))
        for name in chosen:
            HTTP[name](draft, number)
        return draft.asked()

    return ask


def _datatype_over_http(
    row: Datatype, *, binary: bool, answer: bool, count: int = 3
) -> Callable[[int], Asked]:
    def ask(number: int) -> Asked:
        draft = _Draft(row.name, {"x": values_of(row, number, (count,))}, row, binary=binary)
        if answer:
            _wanting("y", binary_data=True)(draft, number)
        return draft.asked()

    return ask


def _long(accepted: str) -> Callable[[int], Asked]:
    def ask(number: int) -> Asked:
        row = DATATYPES["INT32"]
        draft = _Draft("INT32", {"x": values_of(row, number, (900,))}, row)
        draft.headers.append(("Accept-Encoding", accepted))
        return draft.asked()

    return ask


def _bare(number: int) -> Asked:
    row = DATATYPES["FP32"]
    data = values_of(row, number, (3,))
    headers = ((LENGTH, "0"),)
    return Asked({"x": data}, path="/v2/models/FP32/infer", headers=headers, body=data.tobytes())


_INFLATE: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.decompress,
    "deflate": zlib.decompress,
    "": bytes,
}


def answer_of_http(asked: Asked, status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    """Normalize an HTTP answer, as `answer_of_grpc` does for gRPC."""
    content = _INFLATE[headers.get("content-encoding", "")](body)
    length = headers.get(LENGTH.lower())
    shown = {
        "status": status,
        "type": headers["content-type"],
        "coding": headers.get("content-encoding"),
        "has length": length is not None,
    }
    if headers["content-type"].startswith("text/event-stream"):
        content = content.removeprefix(b"data: ").split(b"\n", maxsplit=1)[0]
    text, tail = (
        (content, b"") if length is None else (content[: int(length)], content[int(length) :])
    )
    told = json.loads(text)
    if "error" in told:
        return {**shown, **told}
    outputs = []
    for output in told.pop("outputs"):
        row, shape = DATATYPES[output["datatype"]], tuple(output["shape"])
        parameters = output.pop("parameters", {})
        tensor = None
        if (size := parameters.pop("binary_data_size", None)) is not None:
            tensor, tail = from_bytes(row, shape, tail[:size]), tail[size:]
        elif "data" in output:
            given = output["data"]
            elements = [one.encode() for one in given] if row is BYTES else given
            tensor = from_elements(row, shape, elements)
        form = "placed" if tensor is None else "data" if "data" in output else "binary"
        same = tensor is None or _as_sent(asked, output["name"], tensor)
        outputs.append((output["name"], row.name, shape, form, sorted(parameters), same))
    identity = told.pop("id", "")
    return {
        **shown,
        **told,
        "id": identity == asked.id or identity,
        "outputs": outputs,
        "rest": tail,
    }
