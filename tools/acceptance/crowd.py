"""Clients of one kind: their connections, their requests, and how long they run."""

# pyright: reportAttributeAccessIssue=false
# protobuf generates the classes of service_pb2 at import time, so type checkers do not see them.

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import aiohttp
import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from acceptance.asking import SECONDS, floats, infer_message
from acceptance.books import Books, Fate
from acceptance.subjects import Subject

TURN_SECONDS = 120.0
"""Timeout of a turn; a turn that exceeds it counts as lost."""
_MOST_LOST = 100
"""Lost turns after which all clients of a kind give up."""
_BROKEN = (
    AssertionError,
    grpc.aio.AioRpcError,
    aiohttp.ClientError,
    OSError,
    EOFError,
    LookupError,
    TimeoutError,
    ValueError,
)


@dataclass(frozen=True)
class Stage:
    """State shared by all clients."""

    subject: Subject
    models: Path
    """The served repository."""
    is_over: asyncio.Event


@dataclass(frozen=True)
class Place:
    """A client's connection and counters."""

    stage: Stage
    books: Books
    channel: Any
    session: aiohttp.ClientSession

    @property
    def subject(self) -> Subject:
        """Return the server under test."""
        return self.stage.subject

    @property
    def models(self) -> Path:
        """Return the repository."""
        return self.stage.models

    @property
    def stub(self) -> Any:
        """Return the stub of the service on this client's channel."""
        return service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    async def infer(self, model: str, sent: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Send an inference over gRPC that must succeed."""
        answer = await self.stub.ModelInfer(infer_message(model, sent), timeout=SECONDS)
        self.books.note(model, Fate.ANSWERED)
        return floats(answer.raw_output_contents[0])

    async def post(self, path: str, body: Any, model: str = "", **options: Any) -> str:
        """Send an HTTP POST that must succeed; count it for a model, if one is named."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(path, data=data, **options) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise LookupError(f"{path}: {answer.status} {text[:200]}")
        if model:
            self.books.note(model, Fate.ANSWERED)
        return text

    async def refused(self, asked: Awaitable[Any], *codes: grpc.StatusCode) -> None:
        """Expect the call to fail with one of these statuses."""
        try:
            await asked
        except grpc.aio.AioRpcError as error:
            self.books.expect(error.code() in codes, f"{error.code().name} {error.details()}")
        else:
            self.books.expect(False, f"what should be refused ({codes[0].name}) was answered")

    async def load(self, model: str, **parameters: str) -> None:
        """Load a model, optionally with a configuration or files."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        for name, text in parameters.items():
            request.parameters[name].string_param = text
        await self.stub.RepositoryModelLoad(request, timeout=TURN_SECONDS)

    async def unload(self, model: str) -> None:
        """Unload a model."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        await self.stub.RepositoryModelUnload(request, timeout=TURN_SECONDS)

    async def pause(self, seconds: float) -> None:
        """Wait for some seconds, or until the run ends."""
        try:
            async with asyncio.timeout(seconds):
                await self.stage.is_over.wait()
        except TimeoutError:
            pass


Turn: TypeAlias = Callable[[Place, Random], Awaitable[None]]
"""The action that a client repeats."""


@dataclass(frozen=True)
class Kind:
    """A kind of client, with its own models."""

    name: str
    turn: Turn
    models: tuple[str, ...] = ()
    write: Callable[[Path], object] = lambda root: None
    """Writes the models to a repository."""
    clients: int = 1
    pause_seconds: float = 0.05
    """Pause between two turns of one client."""


async def attend(stage: Stage, kind: Kind, number: int, books: Books) -> None:
    """Run one client of a kind, with its own connections, until the run ends."""
    random = Random(f"{kind.name} {number}")
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(stage.subject.grpc, options=options) as channel,
        aiohttp.ClientSession(f"http://{stage.subject.http}") as session,
    ):
        place = Place(stage, books, channel, session)
        while not stage.is_over.is_set() and len(books.lost) < _MOST_LOST:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    await kind.turn(place, random)
            except _BROKEN as error:
                books.lost.append(_told(error))
            books.turns += 1
            await place.pause(kind.pause_seconds)


def _told(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"[:300]
    return f"{type(error).__name__} {error}"[:300]
