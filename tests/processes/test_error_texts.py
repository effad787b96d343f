"""An error has one status and one text, whichever process answers, over whichever protocol."""

import asyncio
import gzip
import json
import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import h2.events
import pytest
from support import identity_models, python_models, several
from support.http import connect, message
from support.process import ServerProcess, served
from support.replacing import MOST_SECONDS, ending
from support.replacing import replace as replace_server
from support.wire import connect as connect_grpc
from support.wire import framed, request_headers
from tritonclient.grpc import service_pb2 as pb

from xlaserve.net.status import STATUSES
from xlaserve.serving.access.tokens import digest_of, new_token

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import time, invisible to type checkers.

MOST_BYTES = 1 << 13
GATED = """
import pathlib, time

class Model(PythonModel):
    def infer(self, inputs):
        pathlib.Path({begun!r}).touch()
        while not pathlib.Path({gate!r}).exists():
            time.sleep(0.01)
        return {{"y": inputs["x"]}}
"""
QUEUE = """
dynamic_batching {
  default_queue_policy { max_queue_size: 1 allow_timeout_override: true timeout_action: REJECT }
}
"""


class Told(NamedTuple):
    """The status and the text of an answer."""

    status: str
    text: str


@dataclass(frozen=True)
class Ask:
    """A request, which every protocol can express."""

    model: str = "m"
    version: str = ""
    name: str = "x"
    datatype: str = "FP32"
    shape: tuple[int, ...] = (2,)
    values: tuple[float, ...] = (1.0, 2.0)
    output: str = ""
    timeout_us: int = 0
    deadline: str = ""
    """For gRPC only."""
    token: str = ""

    @property
    def raw(self) -> bytes:
        kind = "d" if self.datatype == "FP64" else "f"
        return struct.pack(f"<{len(self.values)}{kind}", *self.values) if self.name else b""

    @property
    def message(self) -> bytes:
        request: Any = pb.ModelInferRequest(model_name=self.model, model_version=self.version)
        if self.name:
            request.inputs.add(name=self.name, datatype=self.datatype, shape=self.shape)
            request.raw_input_contents.append(self.raw)
        if self.output:
            request.outputs.add(name=self.output)
        if self.timeout_us:
            request.parameters["timeout"].int64_param = self.timeout_us
        return bytes(request.SerializeToString())

    @property
    def path(self) -> str:
        version = f"/versions/{self.version}" if self.version else ""
        return f"/v2/models/{self.model}{version}/infer"

    def json(self, *, binary: bool) -> tuple[bytes, list[tuple[str, str]]]:
        tensor: dict[str, Any] = {"name": self.name, "datatype": self.datatype, "shape": self.shape}
        if binary:
            tensor["parameters"] = {"binary_data_size": len(self.raw)}
        else:
            tensor["data"] = self.values
        body: dict[str, Any] = {"inputs": [tensor] if self.name else []}
        if self.output:
            body["outputs"] = [{"name": self.output}]
        if self.timeout_us:
            body["parameters"] = {"timeout": self.timeout_us}
        head = json.dumps(body).encode()
        sent = [("Inference-Header-Content-Length", str(len(head)))] if binary else []
        return head + (self.raw if binary else b""), sent


@dataclass(frozen=True)
class Place:
    server: ServerProcess
    gate: Path
    begun: Path


Door = Callable[[Place, Ask], Awaitable[Told]]


def _shown(ask: Ask) -> list[tuple[str, str]]:
    shown = [("authorization", f"Bearer {ask.token}")] if ask.token else []
    return shown


async def over_grpc(place: Place, ask: Ask, *, encoding: str = "") -> Told:
    headers = _shown(ask)
    body = framed(ask.message)
    if encoding:
        headers.append(("grpc-encoding", encoding))
        body = b"\x01" + framed(gzip.compress(ask.message))[1:]
    if ask.deadline:
        headers.append(("grpc-timeout", ask.deadline))
    path = "/inference.GRPCInferenceService/ModelInfer"
    async with connect_grpc(place.server.url) as wire:
        stream = wire.open(request_headers(path, *headers))
        wire.h2.send_data(stream, body, end_stream=True)
        wire.flush()
        fields = await wire.trailers(stream)
    return Told(fields["grpc-status"], fields.get("grpc-message", ""))


async def over_gzip(place: Place, ask: Ask) -> Told:
    return await over_grpc(place, ask, encoding="gzip")


async def over_stream(place: Place, ask: Ask) -> Told:
    """Send a request on a stream, where an error is a message or ends the stream."""
    headers = _shown(ask)
    if ask.deadline:
        headers.append(("grpc-timeout", ask.deadline))
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    async with connect_grpc(place.server.url) as wire:
        stream = wire.send(request_headers(path, *headers), ask.message)
        await wire.until(h2.events.StreamEnded, stream)
        mine = [e for e in wire.events if getattr(e, "stream_id", None) == stream]
    data = b"".join(e.data for e in mine if isinstance(e, h2.events.DataReceived))
    fields: dict[str, str] = dict([e for e in mine if hasattr(e, "headers")][-1].headers)
    if fields["grpc-status"] != "0":
        return Told(fields["grpc-status"], fields.get("grpc-message", ""))
    answer: Any = pb.ModelStreamInferResponse.FromString(data[5:])
    return Told("", answer.error_message)


async def over_rest(place: Place, ask: Ask, *, binary: bool = False) -> Told:
    body, sent = ask.json(binary=binary)
    async with connect(place.server.http) as client:
        answer = await client.ask(message("POST", ask.path, *_shown(ask), *sent, body=body))
    return Told(str(answer.status), "" if answer.status == 200 else answer.error)


async def over_binary(place: Place, ask: Ask) -> Told:
    return await over_rest(place, ask, binary=True)


DOORS: Mapping[str, Door] = {
    "gRPC": over_grpc,
    "gRPC, gzip": over_gzip,
    "a stream": over_stream,
    "REST": over_rest,
    "REST, binary": over_binary,
}

# --- the errors -------------------------------------------------------------------------------

SLOW, ALL, FEW = new_token(), new_token(), new_token()
"""Tokens of a caller with a quota, one that may infer all models, and one that may infer `m`."""


def rules() -> str:
    limited = {"requests_per_second": 0.000001, "burst": 1}
    infer = {"allow": ["infer"]}
    callers: list[dict[str, Any]] = [
        {"name": "all", "token": digest_of(ALL), **infer},
        {"name": "few", "token": digest_of(FEW), "models": ["m"], **infer},
        {"name": "slow", "token": digest_of(SLOW), **infer, **limited},
        {"name": "looks", "token": digest_of("looks"), "allow": ["metadata"]},
    ]
    return json.dumps({"caller": callers})


async def plainly(place: Place, door: Door, ask: Ask) -> Told:
    return await door(place, ask)


async def twice(place: Place, door: Door, ask: Ask) -> Told:
    """Send requests until the quota is used up, which never refills here."""
    await door(place, ask)
    return await door(place, ask)


@asynccontextmanager
async def executing(place: Place) -> AsyncIterator[None]:
    """Run a request on the gated model for the length of a block."""
    place.gate.unlink(missing_ok=True)
    place.begun.unlink(missing_ok=True)
    first = asyncio.ensure_future(over_rest(place, Ask("gated", token=ALL)))
    async with asyncio.timeout(MOST_SECONDS):
        while not place.begun.exists():
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            place.gate.touch()
            assert Told("200", "") == await first


async def behind(place: Place, door: Door, ask: Ask) -> Told:
    """Send a request while another one is executed."""
    async with executing(place):
        return await door(place, ask)


async def crowded(place: Place, door: Door, ask: Ask) -> Told:
    """Send more requests than the queue holds; return the first refusal."""
    async with executing(place):
        asked = [asyncio.ensure_future(door(place, ask)) for _ in range(3)]
        done, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        told = done.pop().result()
        place.gate.touch()
        await asyncio.gather(*waiting)
        return told


How = Callable[[Place, Door, Ask], Awaitable[Told]]


class Kind(NamedTuple):
    """A kind of error, and how to provoke it."""

    ask: Ask
    how: How = plainly
    but: tuple[str, ...] = ()
    """Protocols on which the error cannot occur, or has protocol-specific text."""


RAW = tuple(DOORS)
KINDS: Mapping[str, Kind] = {
    "unknown model": Kind(Ask("nothing")),
    "unknown version": Kind(Ask(version="9")),
    "no version": Kind(Ask(version="x")),
    "not loaded": Kind(Ask("spare")),
    "failed to load": Kind(Ask("broken")),
    "hidden": Kind(Ask("spare", token=FEW)),
    "no credentials": Kind(Ask(token="wrong")),
    "no permission": Kind(Ask(token="looks")),
    "another datatype": Kind(Ask(datatype="FP64")),
    "no datatype": Kind(Ask(datatype="FP17")),
    "another shape": Kind(Ask(shape=(3,), values=(1.0, 2.0, 3.0))),
    "another rank": Kind(Ask(shape=(1, 2))),
    "too few elements": Kind(Ask(values=(1.0,)), but=("REST",)),
    "no input": Kind(Ask(name="")),
    "unknown input": Kind(Ask(name="z")),
    "unknown output": Kind(Ask(output="z")),
    "code that fails": Kind(Ask("fails")),
    "code that refuses": Kind(Ask("refuses")),
    "too large": Kind(Ask("any", shape=(3_000,), values=(1.0,) * 3_000), but=RAW),
    "quota": Kind(Ask(token=SLOW), twice),
    "queue full": Kind(Ask("gated"), crowded),
    "waited too long": Kind(Ask("gated", timeout_us=1000), behind),
    "deadline": Kind(Ask("gated", deadline="200m"), behind, ("REST", "REST, binary")),
}
ONLY_GRPC = ("deadline",)
NUMBERS = re.compile(r"\d+(\.\d+)? (ms|s|seconds)\b")


def normal(told: Told) -> Told:
    """Remove durations, which vary."""
    return Told(told.status, NUMBERS.sub("TIME", told.text))


async def every_error(place: Place, lacks: Collection[str] = ()) -> dict[tuple[str, str], Told]:
    found = {}
    for kind, (ask, how, but) in KINDS.items():
        for name, door in DOORS.items():
            if (kind in ONLY_GRPC and name in but) or not {kind, name}.isdisjoint(lacks):
                continue
            said = ask if ask.token else replace(ask, token=ALL)
            found[kind, name] = normal(await how(place, door, said))
    return found


# # --- the process models -----------------------------------------------------------------------

FRONT_ENDS = ("--processes", "2", "--process-roles", "front-ends")


@dataclass(frozen=True)
class Model:
    """How a server is divided into processes."""

    flags: tuple[str, ...] = ()
    is_replaced: bool = False
    lacks: tuple[str, ...] = ()
    """Error kinds and protocols that differ in this process model."""


PROCESSES: Mapping[str, Model] = {
    "front ends": Model(FRONT_ENDS),
    # Each worker has its own queue, and the next request may reach another worker.
    "workers": Model(("--processes", "2"), lacks=("queue full", "waited too long", "deadline")),
    "the h2 engine": Model(("--http2-engine", "h2"), lacks=("gRPC, gzip",)),
    "replaced": Model(is_replaced=True),
    "front ends, replaced": Model(FRONT_ENDS, is_replaced=True),
}


def write(root: Path, folder: Path) -> None:
    for name in ("m", "spare"):
        identity_models.write(root, name, "FP32", [2])
    identity_models.write(root, "any", "FP32", [-1])
    (root / "broken" / "1").mkdir(parents=True)
    vectors = python_models.VECTORS.replace("-1", "2")
    code = GATED.format(gate=str(folder / "gate"), begun=str(folder / "begun"))
    python_models.write(root, "gated", code, vectors + QUEUE)
    python_models.write_function(root, "fails", "raise ValueError('of code')", vectors)
    python_models.write_function(root, "refuses", "raise InferenceError('of code')", vectors)


@asynccontextmanager
async def running(folder: Path, model: Model) -> AsyncIterator[Place]:
    root = folder / "models"
    write(root, folder)
    (folder / "rules.json").write_text(rules())
    flags = [
        *("--model-control-mode", "explicit", "--allow-python-models"),
        *("--access-rules", str(folder / "rules.json"), "--max-message-bytes", str(MOST_BYTES)),
        *model.flags,
    ]
    for name in ("m", "any", "gated", "fails", "refuses"):
        flags += ["--load-model", name]
    async with served(root, *flags) as server, ending(server):
        if "--processes" in flags:
            await server.until(several.READY)
        if model.is_replaced:
            await replace_server(server, server.process.pid)
        yield Place(server, folder / "gate", folder / "begun")


@pytest.fixture(name="plain", scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Told]:
    """The errors of a single process."""

    async def all_of_it() -> dict[tuple[str, str], Told]:
        async with running(tmp_path_factory.mktemp("plain"), Model()) as place:
            return await every_error(place)

    return asyncio.run(all_of_it())


STATUS_OF_HTTP = {
    str(row.grpc.value): {str(int(r.http)) for r in STATUSES.values() if r.grpc is row.grpc}
    for row in STATUSES.values()
}


def test_an_error_is_the_same_over_every_protocol(plain: dict[tuple[str, str], Told]) -> None:
    """The text is identical, and the statuses are those of one row of the table."""
    different = {}
    for kind, (_, _, but) in KINDS.items():
        told = {door: plain[kind, door] for door in DOORS if door not in but}
        texts = {one.text for one in told.values()}
        if len(texts) > 1 or "" in texts:
            different[kind] = told
    assert {} == different
    for kind in KINDS:
        code = plain[kind, "gRPC"].status
        assert "0" != code, kind
        assert code == plain[kind, "gRPC, gzip"].status, kind
        if kind not in ONLY_GRPC:
            http = {plain[kind, door].status for door in ("REST", "REST, binary")}
            assert 1 == len(http), kind
            assert http <= STATUS_OF_HTTP[code], (kind, code, http)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "front ends" else [pytest.mark.slow])
        for name in PROCESSES
    ],
)
async def test_an_error_is_the_same_of_every_process(
    tmp_path: Path, name: str, plain: dict[tuple[str, str], Told]
) -> None:
    async with running(tmp_path, PROCESSES[name]) as place:
        found = await every_error(place, PROCESSES[name].lacks)
        zipped = await over_gzip(place, Ask(token=ALL))

    if name == "the h2 engine":
        assert "12" == zipped.status
        assert "--http2-engine" in zipped.text
    else:
        assert Told("0", "") == zipped
    assert {} == {key: (plain[key], told) for key, told in found.items() if told != plain[key]}
