"""Connection and stream errors caused by clients (RFC 9113 5.4)."""

from xlaserve.grpc.http2.frames import ErrorCode


class ConnectionFailure(Exception):
    """A connection error: the server sends a GOAWAY with the code, then closes."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamFailure(Exception):
    """A stream error: the server resets the stream; the connection continues."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.stream_id = stream_id
        self.code = code
        self.reason = reason
