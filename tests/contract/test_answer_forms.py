"""Fast paths preserve the form of answers: all answers to a form equal the first one.

Fast paths, layouts, cached header blocks, plans, response caches, workers and front ends remember
requests. Each form is sent several times, in random order among all others, over unary calls,
streams and gRPC-Web; see `answer_forms`.
"""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import itertools
import json
import random
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc
import numpy as np
import pytest
import pytest_asyncio
import trustme
from support import answer_forms, grpc_web, typed_contract
from support.answer_forms import ORIGIN, REGION, REGION_BYTES, Answer, Asked, Form
from support.answer_models import MODELS, NOT_HERE
from support.http import SECONDS, Connection, message
from support.server import serving
from support.several import several
from support.tls import write_certificate
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import shared_memory

from xlaserve.app.server import Application
from xlaserve.serving.parameters import INPUT, OUTPUT, REQUEST
from xlaserve.serving.stations.table import KINDS as STATIONS
from xlaserve.serving.stations.table import WRAPPINGS, Candidate
from xlaserve.settings.choices import Http2Engine, ProcessRoles, TypedAnswerForm
from xlaserve_proto import inference as proto

pytestmark = pytest.mark.asyncio(loop_scope="module")

METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
SEED = 20261
CONNECTIONS = 3
AUTHORITY = trustme.CA()
EVERYTHING = (
    *("--model-control-mode", "explicit", "--load-model", "*", "--cors-origin", ORIGIN),
    *("--http2-engine", "own"),
)


@dataclass(frozen=True)
class Server:
    """A server of one kind, with connections to it."""

    kind: str
    application: Application | None
    """The application if it runs in this process, else None."""
    channels: Sequence[grpc.aio.Channel]
    connections: Sequence[Connection]

    @property
    def has_compression(self) -> bool:
        """Return whether gRPC messages may be compressed."""
        return self.settings.get("http2_engine") != "h2"

    @property
    def settings(self) -> Mapping[str, Any]:
        return LOCAL.get(self.kind, {})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    answer_forms.write_models(root)
    return root


@pytest.fixture(scope="module")
def region() -> Any:
    key = f"/xlaserve-forms-{random.SystemRandom().getrandbits(64):x}"
    handle = shared_memory.create_shared_memory_region(REGION, key, REGION_BYTES)
    shared_memory.set_shared_memory_region(handle, [*answer_forms.IN_REGION.values()])
    behind = answer_forms.LONG_OFFSET
    shared_memory.set_shared_memory_region(handle, [answer_forms.LONG_IN_REGION], behind)
    yield key
    shared_memory.destroy_shared_memory_region(handle)


async def _connections(url: str, tls: ssl.SSLContext | None) -> list[Connection]:
    host, _, port = url.rpartition(":")
    name = None if tls is None else "localhost"
    opened = [
        await asyncio.open_connection(host, int(port), ssl=tls, server_hostname=name)
        for _ in range(CONNECTIONS)
    ]
    return [Connection(*pair) for pair in opened]


def _channels(url: str, *, is_tls: bool) -> list[grpc.aio.Channel]:
    # Channels with equal options would share a connection.
    options = [[("grpc.use_local_subchannel_pool", 1), ("n", at)] for at in range(CONNECTIONS)]
    if not is_tls:
        return [grpc.aio.insecure_channel(url, options=more) for more in options]
    trust = grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes())
    name = ("grpc.ssl_target_name_override", "localhost")
    return [grpc.aio.secure_channel(url, trust, options=[*more, name]) for more in options]


@asynccontextmanager
async def _running(
    kind: str, models: Path, scratch: Path
) -> AsyncIterator[tuple[str, str, Application | None]]:
    """Run a server; yield its addresses, and its application if it is in this process."""
    if kind in PROCESSES:
        async with several(models, *EVERYTHING, *PROCESSES[kind]) as server:
            yield server.url, server.http, None
        return
    settings: dict[str, Any] = {
        "load_model": ("*",),
        "http_endpoint": "port:0",
        "allow_python_models": True,
        "cors_origin": (ORIGIN,),
        **LOCAL[kind],
    }
    if kind == "TLS":
        settings |= write_certificate(AUTHORITY, scratch)
    if "trace_level" in settings:
        settings |= {name: str(scratch / name) for name in ("access_log", "trace_file")}
    async with serving(scratch, models, **settings) as running:
        yield running.url, str(running.http), running.application


OBSERVED = {"trace_level": "TIMESTAMPS", "trace_rate": 1}
"""Settings that trace and log every request."""
LOCAL: Mapping[str, Mapping[str, Any]] = {
    "own engine": {"http2_engine": "own", "typed_answers": "both"},
    "TLS": {"http2_engine": "own"},
    "h2": {"http2_engine": "h2"},
    # No answer is sent in the event loop iteration in which its request arrived.
    "threads, observed": {
        "inline_execution_seconds": 0,
        "typed_answers": "typed",
        "shared_memory_in_place": True,
        **OBSERVED,
    },
    "raw, as it is": {"typed_answers": "raw", "compress_answers": False, "strict_json": True},
}
PROCESSES: Mapping[str, Sequence[str]] = {
    "two workers": ("--process-roles", "workers"),
    "front ends": ("--process-roles", "front-ends"),
}
KINDS = [*LOCAL, "two workers", pytest.param("front ends", marks=pytest.mark.slow)]


WITH_CONTENTS = [kind for kind in KINDS if LOCAL.get(str(kind), {}).get("typed_answers") != "raw"]
"""Kinds of server that answer typed requests with typed contents."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def server(
    request: pytest.FixtureRequest,
    models: Path,
    region: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Server]:
    kind: str = request.param
    is_tls = kind == "TLS"
    trust = ssl.create_default_context() if is_tls else None
    if trust is not None:
        AUTHORITY.configure_trust(trust)
    async with AsyncExitStack() as stack:
        url, http, application = await stack.enter_async_context(
            _running(kind, models, tmp_path_factory.mktemp("scratch"))
        )
        channels = _channels(url, is_tls=is_tls)
        for channel in channels:
            stack.push_async_callback(channel.close)
        connections = await _connections(http, trust)
        for connection in connections:
            stack.callback(connection.writer.close)
        body = json.dumps({"key": region, "offset": 0, "byte_size": REGION_BYTES}).encode()
        path = f"/v2/systemsharedmemory/region/{REGION}/register"
        status, _, text = await _sent(connections[0], message("POST", path, body=body))
        assert 200 == status, text
        yield Server(kind, application, channels, connections)


async def _sent(connection: Connection, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return status, headers and body, decoding chunks."""
    await connection.send(data)
    answer = await connection.answer()
    body = answer.body
    if answer.headers.get("transfer-encoding") == "chunked":
        async with asyncio.timeout(SECONDS):
            while size := int(await connection.reader.readline(), 16):
                body += (await connection.reader.readexactly(size + 2))[:-2]
            await connection.reader.readline()
    return answer.status, answer.headers, body


async def over_grpc(server: Server, which: int, asked: Asked) -> Answer:
    ask = server.channels[which].unary_unary(METHOD)
    try:
        found = await ask(
            asked.message.SerializeToString(deterministic=True),
            timeout=asked.timeout,
            metadata=asked.metadata,
            compression=asked.compression,
        )
    except grpc.aio.AioRpcError as error:
        return answer_forms.answer_of_grpc(asked, error)
    return answer_forms.answer_of_grpc(asked, found)


async def over_stream(server: Server, which: int, asked: Asked) -> Answer:
    """Send the request in a new stream."""

    async def sent() -> AsyncIterator[bytes]:
        yield asked.message.SerializeToString(deterministic=True)

    ask = server.channels[which].stream_stream(STREAM)
    try:
        stream = ask(
            sent(), timeout=asked.timeout, metadata=asked.metadata, compression=asked.compression
        )
        return answer_forms.answer_of_stream(asked, [one async for one in stream])
    except grpc.aio.AioRpcError as error:
        return answer_forms.answer_of_grpc(asked, error)


async def over_web(server: Server, which: int, asked: Asked) -> Answer:
    body = grpc_web.frame(asked.message.SerializeToString(deterministic=True))
    headers = {
        "Content-Type": "application/grpc-web+proto",
        "Origin": ORIGIN,
        "X-Grpc-Web": "1",
        "Grpc-Timeout": f"{asked.timeout:.0f}S",
        **dict(asked.metadata),
    }
    data = message("POST", METHOD, *headers.items(), body=body)
    _, _, found = await _sent(server.connections[which], data)
    messages, trailers = grpc_web.read(found)
    if trailers["grpc-status"] == "0":
        return answer_forms.answer_of_grpc(asked, messages[0])
    status = next(one for one in grpc.StatusCode if str(one.value[0]) == trailers["grpc-status"])
    return {"status": status.name, "text": unquote(trailers["grpc-message"])}


async def over_http(server: Server, which: int, asked: Asked) -> Answer:
    length = None if asked.chunks else -1
    request = message("POST", asked.path, *asked.headers, body=asked.body, length=length)
    return answer_forms.answer_of_http(asked, *await _sent(server.connections[which], request))


Ask = Callable[[Server, int, Asked], Coroutine[Any, Any, Answer]]


async def every_answer(
    server: Server, forms: Sequence[Form], door: Ask, *others: Ask
) -> dict[str, list[Answer]]:
    """Send each form five times, in random order, over each connection.

    Over the additional protocols it is sent only once.
    """
    turns = [
        (form, over_stream if form.streams_only else door, number)
        for form in forms
        for number in range(form.times)
    ]
    for other in others:
        whole = [one for one in forms if not (other is over_web and one.own_engine_only)]
        turns += [(form, other, 1) for form in whole if not form.streams_only]
    random.Random(SEED).shuffle(turns)
    found: dict[str, list[Answer]] = {form.name: [] for form in forms}

    async def take(which: int) -> None:
        for form, through, number in turns[which::CONNECTIONS]:
            found[form.name].append(await through(server, which, form.ask(number)))

    await asyncio.gather(*map(take, range(CONNECTIONS)))
    return found


def refused(found: Mapping[str, Sequence[Answer]]) -> set[str]:
    return {name for name, answers in found.items() if "outputs" not in answers[0]}


def is_to_be_refused(name: str) -> bool:
    """Return whether a form must be rejected, such as binary outputs in an event stream."""
    if "accepts events" in name:
        return not {*name.split(" & ")}.isdisjoint(BINARY) or "no such" in name
    return "no such" in name or "of 5 rows" in name


BINARY = {"binary outputs", "one output binary", "binary classes", "binary_data_output"}


def is_as_asked(answer: Answer) -> bool:
    """Return whether an answer has the id and values that were sent."""
    if "outputs" not in answer:
        return True  # a rejection has no values
    same = [one for output in answer["outputs"] for one in _checked(output[-1])]
    return answer["id"] is True and all(one is True for one in same)


def _checked(found: Any) -> Sequence[Any]:
    return [*found.values()] if isinstance(found, dict) else [found]


async def test_every_answer_over_grpc_has_the_form_of_the_first(server: Server) -> None:
    forms = [
        form
        for form in answer_forms.grpc_forms(SEED)
        if server.has_compression or not form.own_engine_only
    ]
    found = await every_answer(server, forms, over_grpc, over_stream, over_web)

    assert {} == {name: answers for name, answers in found.items() if differs(answers)}
    assert set(filter(is_to_be_refused, found)) == refused(found)
    assert [] == [
        answer for answers in found.values() for answer in answers if not is_as_asked(answer)
    ]
    for name, answers in found.items():
        # Outputs in shared memory have neither contents.
        filled = [set(output[-1]) for output in answers[0].get("outputs", ()) if output[-1]]
        is_typed = "typed" in name.split() and server.settings.get("typed_answers") != "raw"
        assert all(is_typed == bool(each - {"raw"}) for each in filled), (name, answers[0])


def differs(answers: Sequence[Answer]) -> bool:
    """Return whether the answers differ; errors in a stream have no status to compare."""
    statuses = {answer["status"] for answer in answers if "status" in answer}
    first, *others = [{**answer, "status": None} for answer in answers]
    return len(statuses) > 1 or any(answer != first for answer in others)


async def test_every_answer_over_http_has_the_form_of_the_first(server: Server) -> None:
    found = await every_answer(server, answer_forms.http_forms(SEED), over_http)

    assert {} == {name: answers for name, answers in found.items() if differs(answers)}
    assert set(filter(is_to_be_refused, found)) == refused(found)
    assert [] == [
        answer for answers in found.values() for answer in answers if not is_as_asked(answer)
    ]


# --- A typed request with its fields in any order ------------------------------------------------


def field(number: int, octets: bytes) -> bytes:
    """Encode a length-delimited field with fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(octets)]) + octets


def typed_fields() -> tuple[list[bytes], Callable[[Sequence[bytes]], bytes]]:
    """Return the encoded fields of an input, and a function that makes request fields of it."""
    contents = field(5, pb.InferTensorContents(fp32_contents=[1.5, -2]).SerializeToString())
    of_input = [field(1, b"x"), field(2, b"FP32"), field(3, b"\x02"), contents]
    return of_input, b"".join


@pytest.mark.parametrize("server", WITH_CONTENTS, indirect=True)
async def test_a_typed_request_is_answered_in_contents_whatever_the_order_of_its_fields(
    server: Server,
) -> None:
    """Some clients, such as k6, serialize fields in the random order of a hash table."""
    of_input, join = typed_fields()
    ordinary = field(5, join(of_input))
    of_request = [
        field(1, b"FP32"),
        field(2, b"1"),
        field(3, b"seven"),
        ordinary,
        field(6, field(1, b"y")),
    ]
    messages = [join(order) for order in itertools.permutations(of_request)]
    for order in itertools.permutations(of_input):
        messages.append(join([field(1, b"FP32"), field(5, join(order))]))
    turns = messages * 2
    random.Random(SEED).shuffle(turns)
    found = set()
    for at, data in enumerate(turns):
        answer = await server.channels[at % CONNECTIONS].unary_unary(METHOD)(data, timeout=60)
        (output,) = typed_contract.ModelInferResponse.FromString(answer).outputs
        found.add((output.name, tuple(output.shape), tuple(output.contents.fp32_contents)))

    assert {("y", (2,), (1.5, -2.0))} == found


@pytest.mark.parametrize("server", WITH_CONTENTS, indirect=True)
@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
async def test_a_client_without_raw_fields_sees_its_tensors_beside_others_that_have_them(
    server: Server, datatype: str
) -> None:
    """A client that only knows typed contents gets them in all of 30 answers."""
    dtype = np.dtype("<f4" if datatype == "FP32" else "<f8")
    seen = []
    for number in range(30):
        ask = server.channels[number % CONNECTIONS].unary_unary(METHOD)
        request = typed_contract.ModelInferRequest(model_name=datatype, id=str(number))
        tensor = request.inputs.add(name="x", datatype=datatype, shape=[3])
        elements = [number, 0.5, -number]
        getattr(tensor.contents, f"{datatype.lower()}_contents").extend(elements)
        answer = typed_contract.ModelInferResponse.FromString(
            await ask(request.SerializeToString(), timeout=60)
        )
        (output,) = answer.outputs
        seen.append(elements == [*getattr(output.contents, f"{datatype.lower()}_contents")])
        raw = np.array(elements, dtype).tobytes()
        other = pb.ModelInferRequest(model_name=datatype, raw_input_contents=[raw])
        other.inputs.add(name="x", datatype=datatype, shape=[3])
        answered = pb.ModelInferResponse.FromString(
            await ask(other.SerializeToString(), timeout=60)
        )
        assert ([raw], 0) == (
            [*answered.raw_output_contents],
            answered.outputs[0].contents.ByteSize(),
        )

    assert [True] * 30 == seen


# --- Completeness --------------------------------------------------------------------------------


def _said(parameters: Iterable[Mapping[str, Any]]) -> set[str]:
    return {name for one in parameters for name in one}


async def test_all_that_a_request_may_say_is_asked_for() -> None:
    """Each message field, each parameter type, and each parameter that the server obeys."""
    requests = [form.ask(1).message for form in answer_forms.grpc_forms(SEED)]
    inputs = [tensor for one in requests for tensor in one.inputs]
    outputs = [output for one in requests for output in one.outputs]
    values = [value for one in requests for value in one.parameters.values()]
    messages: Mapping[type[Any], Sequence[Any]] = {
        proto.ModelInferRequest: requests,
        proto.ModelInferRequestInferInputTensor: inputs,
        proto.ModelInferRequestInferRequestedOutputTensor: outputs,
        proto.InferTensorContents: [tensor.contents for tensor in inputs],
        proto.InferParameter: values,
    }
    never = {
        f"{message.__name__}.{one.name}"
        for message, asked in messages.items()
        for one in fields(message)
        if not any(one.name in {said.name for said, _ in each.ListFields()} for each in asked)
    }
    bodies = [form.ask(1) for form in answer_forms.http_forms(SEED)]
    over_rest = " ".join(str(one.body) for one in bodies)

    assert set() == never
    assert set() == {*REQUEST} - _said(one.parameters for one in requests)
    assert set() == {*INPUT} - {"binary_data_size"} - _said(one.parameters for one in inputs)
    assert set() == {*OUTPUT} - _said(one.parameters for one in outputs)
    assert [] == [name for name in {**REQUEST, **INPUT, **OUTPUT} if f'"{name}"' not in over_rest]


async def test_all_ways_of_serving_have_a_server() -> None:
    roles = {flags[flags.index("--process-roles") + 1] for flags in PROCESSES.values()}

    assert {*Http2Engine} == {one.get("http2_engine", "own") for one in LOCAL.values()}
    assert {*TypedAnswerForm} == {one.get("typed_answers", "both") for one in LOCAL.values()}
    assert {*ProcessRoles} == roles | {"auto"}


@pytest.mark.parametrize("server", ["own engine"], indirect=True)
async def test_every_kind_of_station_has_a_model(server: Server) -> None:
    """And every wrapper of stations has one, too."""
    assert server.application is not None
    application, around, kinds = server.application, set(), {}
    for model in MODELS:
        _, instance = application.registry.resolve(model.name)
        candidate = Candidate(application.stations, instance, None)
        if model.kind != "inline":  # on a busy machine another kind may be measured as faster
            kinds[model.name] = next(one.name for one in STATIONS if one.fits(candidate))
        around |= {one.name for one in WRAPPINGS if one.fits(candidate)}

    assert {one.name for one in STATIONS} == {one.kind for one in MODELS} | NOT_HERE.keys()
    assert {one.name: one.kind for one in MODELS if one.kind != "inline"} == kinds
    assert {one.name for one in WRAPPINGS} == around
