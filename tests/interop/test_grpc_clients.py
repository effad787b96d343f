"""grpc-go and grpc-js: other gRPC implementations against our HTTP/2."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import time, invisible to type checkers.

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest
from grpc_health.v1 import health_pb2
from support.process import run
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb

from xlaserve.settings.choices import ModelControlMode

SERVICE = "/inference.GRPCInferenceService"
WATCH = "/grpc.health.v1.Health/Watch"
LARGE = 4 << 20


class Call(NamedTuple):
    """A call, as both clients read it."""

    method: str
    message: bytes = b""
    deadline: str = "-"
    metadata: str = "-"

    def __str__(self) -> str:
        return "\t".join((self.method, self.deadline, self.metadata, self.message.hex()))


class Answer(NamedTuple):
    """The result of a call."""

    code: str
    text: str
    messages: list[bytes]


Make: TypeAlias = Callable[..., Awaitable[list[Answer]]]


@pytest.fixture(params=["go_client", "js_client"])
def client(request: pytest.FixtureRequest) -> tuple[str, ...]:
    command: tuple[str, ...] = request.getfixturevalue(request.param)
    return command


@pytest.fixture
def make(client: tuple[str, ...], tmp_path: Path) -> Make:
    """Make calls one after the other, on one connection."""

    async def run_client(url: str, *calls: Call) -> list[Answer]:
        file = tmp_path / "calls"
        file.write_text("".join(f"{call}\n" for call in calls))
        status, out, err = await run(*client, url, str(file))
        assert status == 0, err
        return [_answer(line) for line in out.splitlines()]

    return run_client


@pytest.fixture
async def url(serve: Serve, example_models: Path) -> AsyncIterator[str]:
    async with serve(example_models, load_model=("simple",)) as server:
        yield server.url


def _answer(line: str) -> Answer:
    code, text, messages = line.split("\t")
    parts = [bytes.fromhex(message) for message in messages.split(",") if message]
    return Answer(code.replace("_", "").lower(), text, parts)


def ready(name: str) -> bytes:
    return bytes(pb.ModelReadyRequest(name=name).SerializeToString())


async def test_calls_of_every_outcome_share_a_connection(make: Make, url: str) -> None:
    """Unary calls that succeed, fail with a message, or name unknown methods."""
    live, missing, unknown, again = await make(
        url,
        Call(f"{SERVICE}/ServerLive"),
        Call(f"{SERVICE}/ModelReady", ready("none \N{SNOWMAN}")),
        Call(f"{SERVICE}/Nope"),
        Call(f"{SERVICE}/ModelReady", ready("simple")),
    )

    assert Answer("ok", live.text, [b"\x08\x01"]) == live
    assert "notfound" == missing.code
    assert "none \N{SNOWMAN}" in missing.text
    assert "unimplemented" == unknown.code
    assert Answer("ok", again.text, [b"\x08\x01"]) == again


async def test_a_message_of_4_mb_comes_back(make: Make, url: str) -> None:
    request = pb.ModelInferRequest(model_name="simple", id="i" * LARGE)
    request.raw_input_contents.extend([bytes(64)] * 2)
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    (answer,) = await make(url, Call(f"{SERVICE}/ModelInfer", bytes(request.SerializeToString())))

    assert ("ok", 1) == (answer.code, len(answer.messages))
    assert LARGE == len(pb.ModelInferResponse.FromString(answer.messages[0]).id)


async def test_a_stream_ends_with_its_deadline_or_its_client(make: Make, url: str) -> None:
    watched = bytes(health_pb2.HealthCheckRequest().SerializeToString())
    late, cancelled, live = await make(
        url,
        Call(WATCH, watched, deadline="0.5s"),
        Call(WATCH, watched, deadline="cancel"),
        Call(f"{SERVICE}/ServerLive"),
    )

    assert ("deadlineexceeded", [b"\x08\x01"]) == (late.code, late.messages)
    assert cancelled.code in ("canceled", "cancelled")
    assert [b"\x08\x01"] == cancelled.messages
    assert "ok" == live.code


async def test_binary_metadata_arrives(make: Make, serve: Serve, tmp_path: Path) -> None:
    """The id in the header takes precedence over the id in the message, as a mesh requires."""
    control = ModelControlMode.NONE
    async with serve(tmp_path, modelmesh=True, model_control_mode=control) as server:
        metadata = "x-a=b,mm-model-id-bin=n\N{SNOWMAN}"
        infer = pb.ModelInferRequest().SerializeToString()
        call = Call(f"{SERVICE}/ModelInfer", bytes(infer), metadata=metadata)
        (answer,) = await make(server.url, call)

    assert "notfound" == answer.code
    assert "n\N{SNOWMAN}" in answer.text
