"""What a request asks for survives every short cut: each answer of a form is as the first one is.

Fast paths, layouts, heads, plans, answers that are kept, workers and front ends remember requests.
Each form is asked for five times in random order between all others; see `answer_forms`.
"""

# pyright: reportAttributeAccessIssue=false
# protobuf makes the classes of service_pb2 when it is imported, where no checker sees them.

import asyncio
import itertools
import json
import random
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import trustme
from support import answer_forms, typed_contract
from support.answer_forms import REGION, REGION_BYTES, Answer, Asked, Form
from support.http import SECONDS, Connection, message
from support.server import serving
from support.several import several
from support.tls import write_certificate
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import shared_memory

pytestmark = pytest.mark.asyncio(loop_scope="module")

METHOD = "/inference.GRPCInferenceService/ModelInfer"
SEED = 20261
TIMES = 5
CONNECTIONS = 3
AUTHORITY = trustme.CA()
EVERYTHING = ("--model-control-mode", "explicit", "--load-model", "*")


@dataclass(frozen=True)
class Server:
    """A server of one kind, and connections to it."""

    channels: Sequence[grpc.aio.Channel]
    connections: Sequence[Connection]
    has_compression: bool = True
    """Whether messages of gRPC may be compressed."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    answer_forms.write_models(root)
    return root


@pytest.fixture(scope="module")
def region() -> Any:
    key = f"/xlaserve-forms-{random.SystemRandom().getrandbits(64):x}"
    handle = shared_memory.create_shared_memory_region(REGION, key, REGION_BYTES)
    shared_memory.set_shared_memory_region(handle, [answer_forms.IN_REGION])
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
    # Channels of equal options would share a connection.
    options = [[("grpc.use_local_subchannel_pool", 1), ("n", at)] for at in range(CONNECTIONS)]
    if not is_tls:
        return [grpc.aio.insecure_channel(url, options=more) for more in options]
    trust = grpc.ssl_channel_credentials(AUTHORITY.cert_pem.bytes())
    name = ("grpc.ssl_target_name_override", "localhost")
    return [grpc.aio.secure_channel(url, trust, options=[*more, name]) for more in options]


@asynccontextmanager
async def _running(kind: str, models: Path, scratch: Path) -> AsyncIterator[tuple[str, str]]:
    """Run a server of a kind; yield where gRPC and HTTP are served."""
    if kind in PROCESSES:
        async with several(models, *EVERYTHING, *PROCESSES[kind]) as server:
            yield server.url, server.http
        return
    settings = {"load_model": ("*",), "http_endpoint": "port:0", **LOCAL[kind]}
    if kind == "TLS":
        settings |= write_certificate(AUTHORITY, scratch)
    async with serving(scratch, models, **settings) as running:
        yield running.url, str(running.http)


LOCAL: Mapping[str, Mapping[str, Any]] = {
    "own engine": {"http2_engine": "own"},
    "TLS": {"http2_engine": "own"},
    "h2": {"http2_engine": "h2"},
}
PROCESSES: Mapping[str, Sequence[str]] = {
    "two workers": ("--http2-engine", "own"),
    "front ends": ("--http2-engine", "own", "--process-roles", "front-ends"),
}
KINDS = [*LOCAL, "two workers", pytest.param("front ends", marks=pytest.mark.slow)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def server(
    request: pytest.FixtureRequest,
    models: Path,
    region: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Server]:
    kind, is_tls = request.param, request.param == "TLS"
    trust = ssl.create_default_context() if is_tls else None
    if trust is not None:
        AUTHORITY.configure_trust(trust)
    async with AsyncExitStack() as stack:
        url, http = await stack.enter_async_context(
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
        yield Server(channels, connections, has_compression=kind != "h2")


async def _sent(connection: Connection, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return status, headers and body of its answer, which may be in chunks."""
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


async def over_http(server: Server, which: int, asked: Asked) -> Answer:
    request = message("POST", asked.path, *asked.headers, body=asked.body)
    return answer_forms.answer_of_http(asked, *await _sent(server.connections[which], request))


async def every_answer(
    server: Server, forms: Sequence[Form], ask: Callable[[Server, int, Asked], Any]
) -> dict[str, list[Answer]]:
    """Ask for each form five times, in random order and on each of the connections."""
    turns = [(form, number) for form in forms for number in range(TIMES)]
    random.Random(SEED).shuffle(turns)
    found: dict[str, list[Answer]] = {form.name: [] for form in forms}

    async def take(which: int) -> None:
        for form, number in turns[which::CONNECTIONS]:
            found[form.name].append(await ask(server, which, form.ask(number)))

    await asyncio.gather(*map(take, range(CONNECTIONS)))
    return found


def refused(found: Mapping[str, Sequence[Answer]]) -> set[str]:
    return {name for name, answers in found.items() if "outputs" not in answers[0]}


def is_to_be_refused(name: str) -> bool:
    """Tell whether a form is one that nobody can be answered in: events are text, say."""
    if "accepts events" in name:
        return not {*name.split(" & ")}.isdisjoint(BINARY) or "no such" in name
    return "no such" in name or "of 5 rows" in name


BINARY = {"binary outputs", "one output binary", "binary classes", "binary_data_output"}


def is_as_asked(answer: Answer) -> bool:
    """Tell whether an answer has the id and the values that were sent."""
    if "outputs" not in answer:
        return True  # a refusal
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
    found = await every_answer(server, forms, over_grpc)

    assert {} == {name: answers for name, answers in found.items() if differs(answers)}
    assert set(filter(is_to_be_refused, found)) == refused(found)
    assert [] == [
        answer for answers in found.values() for answer in answers if not is_as_asked(answer)
    ]
    for name, answers in found.items():
        # An output in shared memory has neither.
        filled = [set(output[-1]) for output in answers[0].get("outputs", ()) if output[-1]]
        is_typed = "typed" in name.split()
        assert all(is_typed == bool(each - {"raw"}) for each in filled), (name, answers[0])


def differs(answers: Sequence[Answer]) -> bool:
    return any(answer != answers[0] for answer in answers)


async def test_every_answer_over_http_has_the_form_of_the_first(server: Server) -> None:
    found = await every_answer(server, answer_forms.http_forms(SEED), over_http)

    assert {} == {name: answers for name, answers in found.items() if differs(answers)}
    assert set(filter(is_to_be_refused, found)) == refused(found)
    assert [] == [
        answer for answers in found.values() for answer in answers if not is_as_asked(answer)
    ]


# --- one typed request, its fields in any order ------------------------------------------------


def field(number: int, octets: bytes) -> bytes:
    """Return a field of bytes, of a message or of a text; short ones alone."""
    return bytes([number << 3 | 2, len(octets)]) + octets


def typed_fields() -> tuple[list[bytes], Callable[[Sequence[bytes]], bytes]]:
    """Return the fields of an input, and what makes the fields of a request of such."""
    contents = field(5, pb.InferTensorContents(fp32_contents=[1.5, -2]).SerializeToString())
    of_input = [field(1, b"x"), field(2, b"FP32"), field(3, b"\x02"), contents]
    return of_input, b"".join


async def test_a_typed_request_is_answered_in_contents_whatever_the_order_of_its_fields(
    server: Server,
) -> None:
    """As clients write them that keep fields in hash tables: k6 does so in random order."""
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


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
async def test_a_client_without_raw_fields_sees_its_tensors_beside_others_that_have_them(
    server: Server, datatype: str
) -> None:
    """It knows the messages of the contract alone: 30 of 30 of its requests are answered to it."""
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
