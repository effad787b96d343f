"""An empty message is a valid message, in which every field has its default."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support import identity_models
from support.server import RunningServer, Serve

from xlaserve.grpc.methods import ROWS
from xlaserve.settings.choices import Http2Engine

STREAMS = (
    "/inference.GRPCInferenceService/ModelStreamInfer",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
MESSAGES = 3


@pytest.fixture(params=list(Http2Engine), ids=str)
async def server(
    request: pytest.FixtureRequest, serve: Serve, tmp_path: Path
) -> AsyncIterator[RunningServer]:
    identity_models.write(tmp_path, "m", "FP32")
    async with serve(tmp_path, load_model=("m",), http2_engine=request.param) as running:
        yield running


@pytest.mark.parametrize("path", STREAMS)
async def test_each_empty_message_of_a_stream_is_answered(server: RunningServer, path: str) -> None:
    async with grpc.aio.insecure_channel(server.url) as channel:
        answers = [
            answer
            async for answer in channel.stream_stream(path)(iter([b""] * MESSAGES), timeout=60)
        ]

    assert MESSAGES == len(answers)


async def test_an_empty_message_is_answered_in_each_unary_method(server: RunningServer) -> None:
    """Never INTERNAL or UNKNOWN; at most an error about a missing field."""
    statuses = {}
    async with grpc.aio.insecure_channel(server.url) as channel:
        for path in set(ROWS) - set(STREAMS) - {"/grpc.health.v1.Health/Watch"}:
            try:
                await channel.unary_unary(path)(b"", timeout=60)
            except grpc.aio.AioRpcError as error:
                statuses[path] = error.code().name

    assert not {"INTERNAL", "UNKNOWN", "CANCELLED", "DEADLINE_EXCEEDED"} & set(statuses.values())
