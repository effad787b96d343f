"""HTTP/2 errors of clients, of a connection or of a stream (RFC 9113, 5.4)."""

from xlaserve.grpc.http2.frames import ErrorCode


class ConnectionFailure(Exception):
    """Ends the connection: a GOAWAY with the code is sent first."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamFailure(Exception):
    """Ends one stream with a RST_STREAM; the others go on."""

    def __init__(self, stream_id: int, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.stream_id = stream_id
        self.code = code
        self.reason = reason
