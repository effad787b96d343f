"""HEADERS and CONTINUATION: header blocks in, requests and trailers out (RFC 9113 6.2, 6.10)."""

from collections.abc import Callable

from xlaserve.grpc.http2.errors import ConnectionFailure, StreamFailure
from xlaserve.grpc.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    MAX_STREAM_ID,
    NUMBER,
    PADDED,
    ErrorCode,
)
from xlaserve.grpc.http2.headers import HARD_FACTOR, Head, HeaderReader, RequestKind
from xlaserve.grpc.http2.limits import Conduct, Http2Limits
from xlaserve.grpc.http2.messages import Problem
from xlaserve.grpc.http2.states import Input
from xlaserve.grpc.http2.stream import Route, ServerStream
from xlaserve.grpc.http2.streams import Streams
from xlaserve.net.ledger import Kind

RequestHead = Head[Route]
RequestRouter = Callable[[RequestKind[Route]], Route]
"""Returns the route for a kind of request; each connection caches the routes of its kinds."""

_ON_ITSELF = 0x100
"""Internal flag, added to those of HEADERS: the stream depends on itself (RFC 7540 5.3.1)."""
_PRIORITY_BYTES = 5


class HeaderFrames:
    """Assembles and decodes header blocks; opens streams with requests, ends them with trailers.

    Invariant: every complete block is decoded, in order and even if its stream is refused or
    closed. Otherwise the HPACK tables of client and server would diverge (RFC 9113 4.3).
    """

    def __init__(
        self,
        limits: Http2Limits,
        router: RequestRouter,
        streams: Streams,
        conduct: Conduct,
    ) -> None:
        self._max_block_bytes = limits.max_header_bytes * HARD_FACTOR
        self._streams = streams
        self._conduct = conduct
        self._max_header_bytes = limits.max_header_bytes
        self._router = router
        self._reader: HeaderReader[Route] | None = None
        """Created with the first block, because most of ten thousand connections are idle."""
        self._block: list[bytes] = []
        self._block_flags = 0
        self.block_bytes = 0
        """Bytes received of the incomplete header block."""
        self.open_block = 0
        """Stream id of the incomplete header block, which CONTINUATION frames continue; 0 if none.
        """
        self.open_since = 0
        """Tick at which the incomplete header block began."""

    # Nearly every request is one HEADERS frame on the next stream, for a unary method. The fast
    # path skips the checks that cannot fail in this case; all else goes through `headers`.

    def open_next(self, stream_id: int, block: bytes) -> bool:
        """Fast path: open a stream for a request; false, without decoding, if not applicable."""
        streams = self._streams
        if (
            stream_id != streams.highest + 2
            or not stream_id & 1  # clients use odd ids (RFC 9113 5.1.1)
            or len(streams.open) >= streams.max_streams
        ):
            return False
        reader = self._reader or self._begun_reader()
        head = reader.seen.get(block) or reader.read_new(block)
        route = head.route
        if route is None or not route.message_first:
            self._request(stream_id, head, END_HEADERS, Input.HEADERS)
            return True
        streams.highest = stream_id
        streams.open[stream_id] = ServerStream(streams, stream_id, head, Input.HEADERS)
        return True

    def _begun_reader(self) -> HeaderReader[Route]:
        """Create the reader for all header blocks of the connection (RFC 9113 4.3)."""
        self._reader = HeaderReader(self._max_header_bytes, self._router)
        return self._reader

    # --- frames ---

    def headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Handle a HEADERS frame (RFC 9113 6.2)."""
        if not stream_id & 1:  # RFC 9113 5.1.1 (even ids), 6.2 (0 is the connection)
            raise ConnectionFailure(
                ErrorCode.PROTOCOL_ERROR, f"expected HEADERS on an odd stream id, got {stream_id}"
            )
        if flags & (PADDED | HAS_PRIORITY):
            payload, on_itself = _unwrapped(flags, stream_id, payload)
            flags |= _ON_ITSELF * on_itself
        block = bytes(payload)
        if flags & END_HEADERS:
            self._block_ended(stream_id, block, flags)
            return
        self._block = [block]
        self._block_flags = flags
        self._hold_block(len(block))
        self.open_block = stream_id
        self.open_since = self._streams.tick

    def continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Handle a CONTINUATION frame of the incomplete block's stream (RFC 9113 6.10)."""
        if not self.open_block:  # RFC 9113 6.10
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._block.append(bytes(payload))
        self._hold_block(self.block_bytes + len(payload))
        if self.block_bytes > self._max_block_bytes:  # RFC 9113 10.5.1
            raise ConnectionFailure(
                ErrorCode.ENHANCE_YOUR_CALM, "header block too large (max_header_bytes)"
            )
        if not flags & END_HEADERS:
            self._conduct.count_control()
            return
        block, self._block = b"".join(self._block), []
        self.open_block = 0
        self._hold_block(0)
        self._block_ended(stream_id, block, self._block_flags)

    def discard(self) -> None:
        """Drop the incomplete header block: the connection ends."""
        self._block = []
        self._hold_block(0)

    def _hold_block(self, size: int) -> None:
        """Set the number of bytes held in the ledger for the incomplete header block."""
        change, self.block_bytes = size - self.block_bytes, size
        if change > 0:
            self._streams.account.hold(change, Kind.AHEAD)
        else:
            self._streams.account.release(-change, Kind.AHEAD)

    # --- blocks ---

    def _block_ended(self, stream_id: int, block: bytes, flags: int) -> None:
        stream = self._streams.open.get(stream_id)
        happening = Input.HEADERS_END if flags & END_STREAM else Input.HEADERS
        if stream is not None:
            self._trailers(stream, block, flags, happening)
            return
        head = (self._reader or self._begun_reader()).read(block)
        if stream_id <= self._streams.highest:
            self._streams.advance(stream_id, happening)
        else:
            self._request(stream_id, head, flags, happening)

    def _request(self, stream_id: int, head: RequestHead, flags: int, happening: Input) -> None:
        streams = self._streams
        streams.take_id(stream_id)
        if len(streams.open) >= streams.max_streams:  # RFC 9113 5.1.2
            self._conduct.count_control()
            streams.write_reset(stream_id, ErrorCode.REFUSED_STREAM)
            return
        problem = "a stream that depends on itself" if flags & _ON_ITSELF else head.problem
        if problem is not None:  # RFC 9113 8.1.1; RFC 7540 5.3.1
            raise StreamFailure(stream_id, ErrorCode.PROTOCOL_ERROR, problem)
        if flags & END_STREAM and head.content_length:  # RFC 9113 8.1.1
            raise StreamFailure(
                stream_id, ErrorCode.PROTOCOL_ERROR, "body size differs from content-length"
            )
        route = head.route
        assert route is not None  # only malformed requests have no route
        stream = streams.add(stream_id, head, happening)
        if not route.message_first:
            stream.begin()
        elif flags & END_STREAM:
            stream.begin(Problem.NONE)

    def _trailers(self, stream: ServerStream, block: bytes, flags: int, happening: Input) -> None:
        problem = (self._reader or self._begun_reader()).read_trailers(block)
        self._streams.advance(stream.id, happening)
        expected = stream.head.content_length
        if problem is None and expected is not None and stream.received != expected:
            problem = "body size differs from content-length"
        if flags & _ON_ITSELF:
            problem = "a stream that depends on itself"
        if problem is not None:  # RFC 9113 8.1, 8.1.1; RFC 7540 5.3.1
            raise StreamFailure(stream.id, ErrorCode.PROTOCOL_ERROR, problem)
        stream.end_request()


def _unwrapped(flags: int, stream_id: int, payload: memoryview) -> tuple[memoryview, bool]:
    """Strip padding and priority; return the block, and whether the stream depends on itself."""
    padding = 0
    if len(payload) < bool(flags & PADDED) + _PRIORITY_BYTES * bool(
        flags & HAS_PRIORITY
    ):  # RFC 9113 4.2
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "truncated HEADERS")
    if flags & PADDED:
        padding = payload[0]
        payload = payload[1:]
    on_itself = False
    if flags & HAS_PRIORITY:
        on_itself = NUMBER.unpack_from(payload)[0] & MAX_STREAM_ID == stream_id
        payload = payload[_PRIORITY_BYTES:]
    if padding > len(payload):  # RFC 9113 6.2
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "padding exceeds the frame")
    return payload[: len(payload) - padding], on_itself
