"""Runs the requests of one connection through grpclib."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

from grpclib.protocol import Stream
from grpclib.server import Handler, request_handler

from xlaserve.transport.grpc.identifiers import split_binary_lists
from xlaserve.transport.grpc.request_headers import timeout_seconds

Headers: TypeAlias = list[tuple[str, str]]

_SHORT_SECONDS = 0.05
"""A shorter time may be over before grpclib begins to watch it, which it then calls UNKNOWN."""
_LOOK_SECONDS = 0.05


class RequestHandler(Handler):
    """A task for each request of a connection."""

    def accept(
        self, stream: Stream, headers: Sequence[tuple[str, str]], release_stream: Callable[[], None]
    ) -> None:
        # A request that is cancelled before its task first runs never comes to release its stream,
        # and with it what the client may send on the connection.
        release = ExitStack()
        release.callback(release_stream)
        task = self.loop.create_task(self._handle(stream, list(headers), release.close))
        self._tasks[stream] = task

        def done(_: object) -> None:
            self._tasks.pop(stream, None)
            release.close()
            _forget_error(stream)

        task.add_done_callback(done)

    def cancel(self, stream: Stream) -> None:
        task = self._tasks.pop(stream, None)
        if task is not None:
            task.cancel()
            self._cancelled.add(task)
            task.add_done_callback(self._cancelled.discard)

    async def idle(self, *, but_waiting: bool) -> None:
        """Return when every request has ended, or waits for its client where that is enough."""
        while tasks := self._cancelled | {
            task for stream, task in self._tasks.items() if not (but_waiting and _waits(stream))
        }:
            # One that begins to wait does not end.
            await asyncio.wait(tasks, timeout=_LOOK_SECONDS if but_waiting else None)

    async def _handle(
        self, stream: Stream, headers: Headers, release_stream: Callable[[], None]
    ) -> None:
        with self._short_deadline(stream, headers) as left:
            await request_handler(
                self.mapping,
                stream,
                split_binary_lists(left),
                self.codec,
                self.status_details_codec,
                self.dispatch,
                release_stream,
            )

    @contextmanager
    def _short_deadline(self, stream: Stream, headers: Headers) -> Iterator[Headers]:
        """Watch the time of a request if it is short; return the headers that are left then."""
        seconds = timeout_seconds(headers)
        if seconds is None or seconds >= _SHORT_SECONDS:
            yield headers
            return
        timer = self.loop.call_later(seconds, _end, stream)
        try:
            yield [(name, value) for name, value in headers if name != "grpc-timeout"]
        finally:
            timer.cancel()


def _waits(stream: Stream) -> bool:
    return bool(getattr(stream, "waiting", False))


def _end(stream: Stream) -> None:
    if stream.wrapper is not None:
        stream.wrapper.cancel(TimeoutError("Deadline exceeded"))


def _forget_error(stream: Stream) -> None:
    # The error that ended a request holds its frames, and they hold it: request and answer would
    # stay until the next full collection.
    error = getattr(stream.wrapper, "_error", None)
    if error is not None:
        error.__traceback__ = error.__context__ = None
