"""Encoding and decoding of gRPC-Web bodies (gRPC's PROTOCOL-WEB.md)."""

import base64
import struct


def frame(data: bytes, flag: int = 0, length: int | None = None) -> bytes:
    return struct.pack(">BL", flag, len(data) if length is None else length) + data


def read(body: bytes) -> tuple[list[bytes], dict[str, str]]:
    """Decode a body into messages and trailers, which must be the last frame."""
    messages, trailers = [], None
    while body:
        assert trailers is None
        flag, length = struct.unpack_from(">BL", body)
        data, body = body[5 : 5 + length], body[5 + length :]
        assert length == len(data)
        if flag == 0x80:
            lines = data.decode().split("\r\n")
            assert "" == lines.pop()
            trailers = dict(line.split(":", 1) for line in lines)
        else:
            assert 0 == flag
            messages.append(data)
    assert trailers is not None
    return messages, trailers


def plain(body: bytes) -> bytes:
    """Decode a text body, a concatenation of separately padded base64 parts."""
    parts = [body[i : i + 4] for i in range(0, len(body), 4)]
    return b"".join(base64.b64decode(part, validate=True) for part in parts)
