"""Reading and decompressing request bodies within limits of size, chunks and time."""

import asyncio
from dataclasses import dataclass
from functools import partial

from xlaserve.errors import BodyTimeout, InvalidBody, ShuttingDown, TooLarge
from xlaserve.grpc.http2.messages import Allocate
from xlaserve.http import compression
from xlaserve.http.connection.chunks import BodyFault
from xlaserve.http.connection.held import Held
from xlaserve.http.connection.request import Request
from xlaserve.http.connection.request_body import Body
from xlaserve.http.threads import OffLoop
from xlaserve.serving.call import outside_call

_FIRST_BYTES = 64 << 10
"""Bytes reserved initially for a body of unknown length."""
_AROUND_A_BODY = 64 << 10
_AROUND_A_CHUNK = 32
"""Overhead allowed per chunk: size lines, line ends, extensions and trailers."""
_STALL_SECONDS = 1.0
"""Seconds that a draining server waits for the next bytes of a body."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Limits of a request body."""

    max_bytes: int
    """Maximum number of bytes, both before and after decompression."""
    max_chunks: int
    timeout_seconds: float


class BodyReader:
    """Reads request bodies; one instance per server."""

    def __init__(self, limits: BodyLimits, threads: OffLoop, allocate: Allocate) -> None:
        self._limits = limits
        self._allocate = allocate
        self._threads = threads
        self._is_draining = False
        self._is_over = False
        """Whether incomplete bodies are refused immediately."""
        self._timeouts: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        """From now on, refuse any body that receives no bytes for a second."""
        self._is_draining = True
        for timeout in self._timeouts:
            self._expect_more(timeout)

    def refuse(self) -> None:
        """Refuse every incomplete body immediately: the grace period has expired."""
        self._is_draining = self._is_over = True
        for timeout in self._timeouts:
            self._expect_more(timeout)

    def _expect_more(self, timeout: asyncio.Timeout) -> None:
        """Set the deadline for the next bytes of a body while the server drains."""
        if timeout.expired():
            return  # the request's task has yet to handle the timeout
        now = asyncio.get_running_loop().time()
        timeout.reschedule(now if self._is_over else now + _STALL_SECONDS)

    async def read(self, request: Request, held: Held) -> memoryview:
        """Return the whole body, decompressed. Part of its timeout may have elapsed already.

        The memory is charged to `held`; the caller releases it. Raises TooLarge before it reads a
        body whose declared length exceeds the limit, BudgetExhausted if no memory becomes available
        in time, BodyTimeout, InvalidBody, UnsupportedEncoding, or ShuttingDown if the server drains
        and the body does not arrive.
        """
        length = request.body.length
        if length == 0:
            return memoryview(b"")
        coding = compression.request_coding(request.headers.get("Content-Encoding", ""))
        if length is not None and length > self._limits.max_bytes:
            self._raise_too_large()
        # Send `100 Continue` only now, so that a client need not send the body of a refused
        # request.
        request.let_body_come()
        seconds = self._limits.timeout_seconds - request.waited_seconds
        body = await self._receive_in_time(request.body, length, held, seconds)
        if coding == compression.IDENTITY:
            return body
        return await self._inflate(coding, body, held)

    async def _receive_in_time(
        self, content: Body, length: int | None, held: Held, seconds: float
    ) -> memoryview:
        timeout = asyncio.timeout(None)
        due = asyncio.get_running_loop().time() + seconds
        try:
            async with timeout:
                outside_call().run(timeout.reschedule, due)
                self._timeouts.add(timeout)
                if self._is_draining:
                    self._expect_more(timeout)
                return await self._receive(content, length, held, timeout)
        except TimeoutError:
            if not timeout.expired():
                raise
            if held.is_waiting:
                raise held.account.refusal("the body", length or 0) from None
            if self._is_draining:
                raise ShuttingDown from None
            raise BodyTimeout(self._limits.timeout_seconds) from None
        except BodyFault as error:
            raise InvalidBody(f"the body is malformed: {error}") from error
        finally:
            self._timeouts.discard(timeout)

    async def _receive(
        self, content: Body, length: int | None, held: Held, timeout: asyncio.Timeout
    ) -> memoryview:
        if length is None:
            return await self._receive_bounded(content, held, timeout)
        # Reserve the whole body up front, so that other requests cannot prevent it from completing.
        await held.reserve(length)
        first = await content.read()
        if len(first) == length:
            return memoryview(first)
        # The buffer is not zeroed, so that pages of a declared but unsent body never become
        # resident.
        whole = self._allocate(length).data
        filled, piece = 0, first
        while piece:
            whole[filled : filled + len(piece)] = piece
            filled += len(piece)
            if self._is_draining:
                self._expect_more(timeout)
            piece = await content.read()
        return whole[:filled]

    async def _receive_bounded(
        self, content: Body, held: Held, timeout: asyncio.Timeout
    ) -> memoryview:
        """Receive a chunked body, and limit the bytes of its chunk framing."""
        overran = False

        def overrun() -> None:
            nonlocal overran
            if not timeout.expired():
                overran = True
                timeout.reschedule(asyncio.get_running_loop().time())

        around = _AROUND_A_BODY + self._limits.max_chunks * _AROUND_A_CHUNK
        held.bound_wire(self._limits.max_bytes + around, overrun)
        try:
            return await self._receive_chunks(content, held, timeout)
        except asyncio.CancelledError:
            if not overran:
                raise
            raise InvalidBody(
                f"expected at most {around} bytes of chunk sizes, chunk extensions and trailers "
                "(max_http_chunks), got more"
            ) from None
        finally:
            held.unbound_wire()

    async def _receive_chunks(
        self, content: Body, held: Held, timeout: asyncio.Timeout
    ) -> memoryview:
        whole, reserved = bytearray(), _FIRST_BYTES
        await held.reserve(reserved)
        while True:
            piece = await content.read()
            if content.chunks > self._limits.max_chunks:
                raise InvalidBody(
                    f"expected a body of at most {self._limits.max_chunks} chunks "
                    "(max_http_chunks), got more"
                )
            if not piece:
                held.grow(len(whole) - reserved)
                return memoryview(whole)
            if len(whole) + len(piece) > reserved:
                # Grow the reservation by half: few reallocations, and little memory reserved in
                # vain.
                more = max(len(whole) + len(piece), reserved * 3 // 2) - reserved
                held.grow(more)
                reserved += more
            if self._is_draining:
                self._expect_more(timeout)
            whole += piece
            if len(whole) > self._limits.max_bytes:
                self._raise_too_large()

    def _raise_too_large(self) -> None:
        raise TooLarge("the body", self._limits.max_bytes, "max_message_bytes")

    async def _inflate(self, coding: str, body: memoryview, held: Held) -> memoryview:
        run = partial(self._threads.run, self._limits.max_bytes)  # in a thread, even if it is short
        inflated = await compression.inflate_within(
            coding, body, self._limits.max_bytes, held.grow, run
        )
        held.grow(-len(body))
        return inflated
