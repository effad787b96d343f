"""Call attributes taken from request headers, and those known only with the message."""

from pathlib import Path

import grpc.aio
import pytest
from support import identity_models
from support.calls import NotingObserver
from support.server import Serve
from support.wire import connect, request_headers

from xlaserve.app import server as app
from xlaserve.errors import DeadlineExceeded
from xlaserve.grpc.calls import FieldsView
from xlaserve.serving.gates import Gates

SERVICE = "/inference.GRPCInferenceService/"
NAME = b"\x0a\x04fp32\x12\x011"


def test_headers_of_one_name_are_one_list() -> None:
    """RFC 9110 5.3: values of a repeated header are joined with commas."""
    headers = FieldsView([("a", "1"), ("b", "2"), ("a", "3")])

    assert ("1, 3", "2", None) == (headers.get("a"), headers.get("b"), headers.get("c"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> NotingObserver:
    """Record the calls of the servers of a test."""
    observer = NotingObserver()
    monkeypatch.setattr(app, "Gates", lambda **_: Gates(observers=[observer]))
    return observer


async def test_a_call_knows_its_model_once_its_message_is_there(
    serve: Serve, tmp_path: Path, seen: NotingObserver
) -> None:
    identity_models.write(tmp_path / "models", "fp32", "FP32")
    async with serve(tmp_path / "models", load_model=("fp32",)) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            await channel.unary_unary(SERVICE + "ModelMetadata")(NAME)
    ((calls, outcome),) = seen.ended_with

    assert [("fp32", "1")] == [(call.model, call.version) for call in calls]
    assert outcome is None


async def test_the_deadline_of_a_call_ends_it(
    serve: Serve, tmp_path: Path, seen: NotingObserver
) -> None:
    """However short the deadline is; the method is cancelled."""
    headers = request_headers("/grpc.health.v1.Health/Watch", ("grpc-timeout", "2m"))
    async with serve(tmp_path) as server, connect(server.url) as wire:
        answer = await wire.trailers(wire.send(headers))
    ((_, outcome),) = seen.ended_with

    assert "4" == answer["grpc-status"]
    assert isinstance(outcome, DeadlineExceeded)
    assert seen.began_with[0].deadline is not None
