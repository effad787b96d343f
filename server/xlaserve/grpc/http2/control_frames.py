"""Handlers of control frames, PRIORITY to WINDOW_UPDATE (RFC 9113 6.3 to 6.9)."""

from collections.abc import Callable

from xlaserve.grpc.http2.dynamic_table import TABLE_BYTES
from xlaserve.grpc.http2.errors import ConnectionFailure, StreamFailure
from xlaserve.grpc.http2.frames import (
    ACK,
    LARGEST_MAX_FRAME,
    MAX_STREAM_ID,
    MAX_WINDOW,
    NUMBER,
    SETTING,
    SETTINGS_ACK,
    SMALLEST_MAX_FRAME,
    ErrorCode,
    Setting,
    ping_ack,
)
from xlaserve.grpc.http2.limits import Conduct
from xlaserve.grpc.http2.sending import Sender
from xlaserve.grpc.http2.states import Input
from xlaserve.grpc.http2.streams import Streams

ROUND_TRIP = b"farewell"
"""Payload of the PING that follows the first GOAWAY of a graceful shutdown."""


class ControlFrames:
    """Validates, counts and applies control frames; each handler gets a complete frame."""

    def __init__(self, streams: Streams, sender: Sender, conduct: Conduct) -> None:
        self._streams = streams
        self._sender = sender
        self._conduct = conduct
        self.settled = False
        """Whether the SETTINGS after the client's preface were received (RFC 9113 3.4)."""
        self.client_leaves = False
        """Whether the client has sent a GOAWAY (RFC 9113 6.8)."""
        self.on_round_trip: Callable[[], None] | None = None
        """Called when the client acknowledges the PING with the payload `ROUND_TRIP`."""

    def unknown(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Ignore a frame of unknown type (RFC 9113 4.1, 5.5)."""
        self._conduct.count_control()

    def priority(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Validate a PRIORITY frame, and ignore the priority (RFC 9113 5.3.2, 6.3)."""
        self._conduct.count_control()
        if not stream_id:  # RFC 9113 6.3
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != 5:  # RFC 9113 6.3
            raise StreamFailure(stream_id, ErrorCode.FRAME_SIZE_ERROR, "PRIORITY is not five bytes")
        if NUMBER.unpack_from(payload)[0] & MAX_STREAM_ID == stream_id:  # RFC 7540 5.3.1
            raise StreamFailure(
                stream_id, ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself"
            )

    def rst_stream(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Close the stream that the client reset (RFC 9113 6.4)."""
        if len(payload) != 4:  # RFC 9113 6.4
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM is not four bytes")
        self._streams.reset_by_client(stream_id, NUMBER.unpack(payload)[0])

    def settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Apply the client's settings and acknowledge them (RFC 9113 6.5, 6.5.3)."""
        if stream_id:  # RFC 9113 6.5
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & ACK:
            if len(payload):  # RFC 9113 6.5
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS ACK with a payload")
            self._conduct.count_control()
            return
        if len(payload) % SETTING.size:  # RFC 9113 6.5
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with an incomplete entry")
        if self.settled:
            self._conduct.count_control()
        self.settled = True
        self._apply(payload)
        self._sender.write(SETTINGS_ACK)
        self._sender.pump()

    def _apply(self, payload: memoryview) -> None:
        """Apply settings in order, ignoring unknown ones (RFC 9113 6.5.2, 6.5.3)."""
        window = widest = self._streams.peer_window
        for number, value in SETTING.iter_unpack(payload):
            if number == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:  # RFC 9113 6.5.2
                    raise ConnectionFailure(
                        ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE {value} is too large"
                    )
                window = value
                widest = max(widest, value)
            elif number == Setting.MAX_FRAME_SIZE:
                if not SMALLEST_MAX_FRAME <= value <= LARGEST_MAX_FRAME:  # RFC 9113 6.5.2
                    raise ConnectionFailure(
                        ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE {value} is out of range"
                    )
                self._sender.max_frame = value
            elif number == Setting.ENABLE_PUSH and value > 1:  # RFC 9113 6.5.2
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH {value}")
            elif number == Setting.HEADER_TABLE_SIZE and value < TABLE_BYTES:  # RFC 9113 4.3.1
                self._sender.give_up_table()
        if (window, widest) != (self._streams.peer_window,) * 2:
            self._streams.change_peer_window(window, widest)

    def push_promise(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Fail the connection: a client must not send PUSH_PROMISE (RFC 9113 8.4)."""
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Acknowledge a PING, or handle the acknowledgement of ours (RFC 9113 6.7)."""
        if stream_id:  # RFC 9113 6.7
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:  # RFC 9113 6.7
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "PING is not eight bytes")
        self._conduct.count_control()
        if not flags & ACK:
            self._sender.write(ping_ack(bytes(payload)))
        elif self.on_round_trip is not None and payload == ROUND_TRIP:
            called, self.on_round_trip = self.on_round_trip, None
            called()

    def goaway(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Record that the client will open no more streams (RFC 9113 6.8)."""
        if stream_id:  # RFC 9113 6.8
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:  # RFC 9113 4.2, 6.8
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY has fewer than eight bytes")
        self._conduct.count_control()
        self.client_leaves = True

    def window_update(self, flags: int, stream_id: int, payload: memoryview) -> None:
        """Increase a send window, and send the data that it held back (RFC 9113 6.9)."""
        if len(payload) != 4:  # RFC 9113 6.9
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE is not four bytes")
        increment = NUMBER.unpack(payload)[0] & MAX_STREAM_ID
        if stream_id:
            stream = self._streams.advance(stream_id, Input.WINDOW_UPDATE)
            if stream is None:
                return
            if not increment:  # RFC 9113 6.9
                raise StreamFailure(
                    stream_id, ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE with increment 0"
                )
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:  # RFC 9113 6.9.1
                raise StreamFailure(
                    stream_id, ErrorCode.FLOW_CONTROL_ERROR, "flow-control window overflow"
                )
        else:
            if not increment:  # RFC 9113 6.9
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE with increment 0")
            if not self._sender.widen(increment):  # RFC 9113 6.9.1
                raise ConnectionFailure(
                    ErrorCode.FLOW_CONTROL_ERROR, "flow-control window overflow"
                )
        self._conduct.count_control()
        self._sender.pump()
