"""Runs a task for each request on the general path."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack, suppress

from grpclib.const import Status
from grpclib.protocol import AbstractHandler, Stream

from xlaserve.grpc.request_headers import Headers
from xlaserve.grpc.runner import Runner
from xlaserve.net.ledger import Account
from xlaserve.serving.call import NOBODY, Peer
from xlaserve.serving.call import Headers as CallHeaders
from xlaserve.serving.peers import peer_of

_LOOK_SECONDS = 0.05


class RequestHandler(AbstractHandler):
    """Starts, tracks and cancels the request tasks of one connection."""

    def __init__(self, runner: Runner, listener: str) -> None:
        self._runner = runner
        self._listener = listener
        self.peer: Peer = NOBODY
        self._tasks: dict[Stream, asyncio.Task[None]] = {}
        self._cancelled: dict[asyncio.Task[None], None] = {}

    def connected(self, transport: asyncio.BaseTransport, account: Account) -> None:
        """Identify the peer of a new connection."""
        self.peer = peer_of(transport, self._listener, account)

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], None]) -> None:
        """Start the task that answers a request; `release_stream` is called once, at its end."""
        # Release in a done callback: a task cancelled before its first step never runs its
        # `finally`, and the flow-control window held by its stream would be lost.
        release = ExitStack()
        release.callback(release_stream)
        task = asyncio.get_running_loop().create_task(self._handle(stream, headers))
        self._tasks[stream] = task

        def done(task: "asyncio.Task[None]") -> None:
            self._tasks.pop(stream, None)
            self._cancelled.pop(task, None)
            release.close()

        task.add_done_callback(done)

    def no_method(
        self, path: str, headers: CallHeaders, deadline: float | None
    ) -> tuple[Status, str]:
        """Return the status and message for an unknown method."""
        return self._runner.no_method(path, headers, self.peer, deadline)

    def cancel(self, stream: Stream) -> None:
        """Cancel the task of a request that the client abandoned."""
        task = self._tasks.pop(stream, None)
        if task is not None:
            task.cancel()
            self._cancelled[task] = None

    def close(self) -> None:
        """Cancel all requests: the connection is gone."""
        for stream in tuple(self._tasks):
            self.cancel(stream)

    async def idle(self, *, but_waiting: bool) -> None:
        """Wait until every request has ended or, with `but_waiting`, waits for its client."""
        while tasks := self._cancelled.keys() | {
            task for stream, task in self._tasks.items() if not (but_waiting and _waits(stream))
        }:
            # Poll: a task that starts to wait for its client does not complete.
            await asyncio.wait(tasks, timeout=_LOOK_SECONDS if but_waiting else None)

    async def _handle(self, stream: Stream, headers: Headers) -> None:
        # Suppressed to avoid a reference cycle: a cancelled task keeps the exception, whose
        # traceback holds the request's frames, which hold the task.
        with suppress(asyncio.CancelledError):
            await self._runner.run(stream, headers, self.peer)


def _waits(stream: Stream) -> bool:
    return bool(getattr(stream, "waiting", False))
