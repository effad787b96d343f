"""Incremental decoder of chunked bodies (RFC 9112, 7.1), which never reads past their end."""

import re
from collections.abc import Callable

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(;[\t -~\x80-\xff]*)?\r\n")
_SIZE_PART = re.compile(rb"[0-9A-Fa-f]{0,16}|[0-9A-Fa-f]{1,16}((;[\t -~\x80-\xff]*)?\r?)")
"""Matches an incomplete chunk-size line."""
_TRAILER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[\t -~\x80-\xff]*\r\n")
_TRAILER_PART = re.compile(rb"\r|([!#$%&'*+\-.^_`|~0-9A-Za-z]+(:[\t -~\x80-\xff]*\r?)?)?")
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host"})
"""Fields that are forbidden in trailers (RFC 9110, 6.5.1)."""
_MOST_LINE_BYTES = 16 << 10
_MOST_TRAILER_BYTES = 64 << 10
_BREAK = b"\r\n"
_IN_LINE, _IN_TRAILERS = -1, -2
"""States of `_left` outside a chunk: reading the next size line, or reading trailers."""


class BodyFault(Exception):
    """A truncated body, or one with malformed framing."""


class Chunks:
    """Decodes one chunked body."""

    __slots__ = ("_left", "_rest", "_trailers", "count", "is_complete")

    def __init__(self) -> None:
        self._rest = b""
        """Start of an incomplete line."""
        self._left = _IN_LINE
        """Remaining bytes of the current chunk; 0 while its final line break is expected."""
        self._trailers = 0
        self.count = 0
        """Number of complete chunks."""
        self.is_complete = False

    def feed(self, data: bytes, keep: Callable[[bytes], None]) -> int:
        """Decode bytes, and return how many of them belong to the body; raises BodyFault."""
        kept = len(self._rest)
        if kept:
            data = self._rest + data
            self._rest = b""
        position, size = 0, len(data)
        while position < size and not self.is_complete:
            if self._left == _IN_LINE:
                position = self._read_size(data, position)
            elif self._left == _IN_TRAILERS:
                position = self._read_trailer(data, position)
            elif self._left:
                position = self._read_content(data, position, keep)
            else:
                position = self._read_break(data, position)
        return position - kept

    def _read_size(self, data: bytes, position: int) -> int:
        found = _SIZE.match(data, position)
        if found is None:
            return self._keep_part(data, position, _SIZE_PART, "the size of a chunk")
        size = int(found[1], 16)
        self._left = size or _IN_TRAILERS
        return found.end()

    def _read_content(self, data: bytes, position: int, keep: Callable[[bytes], None]) -> int:
        content = data[position : position + self._left]
        keep(content)
        self._left -= len(content)
        return position + len(content)

    def _read_break(self, data: bytes, position: int) -> int:
        if data.startswith(_BREAK, position):
            self._left = _IN_LINE
            self.count += 1
            return position + len(_BREAK)
        if data[position:] != _BREAK[:1]:
            raise BodyFault("a chunk does not match its size")
        self._rest = _BREAK[:1]
        return len(data)

    def _read_trailer(self, data: bytes, position: int) -> int:
        if data.startswith(_BREAK, position):
            self.is_complete = True
            return position + len(_BREAK)
        found = _TRAILER.match(data, position)
        if found is None:
            return self._keep_part(data, position, _TRAILER_PART, "a trailer")
        if found[1].lower() in _FRAMING:
            raise BodyFault(f"'{found[1].decode()}' is not a valid trailer")
        self._trailers += found.end() - position
        if self._trailers > _MOST_TRAILER_BYTES:
            raise BodyFault(f"the trailers are longer than {_MOST_TRAILER_BYTES} bytes")
        return found.end()

    def _keep_part(
        self, data: bytes, position: int, pattern: "re.Pattern[bytes]", what: str
    ) -> int:
        rest = data[position:]
        if len(rest) > _MOST_LINE_BYTES or pattern.fullmatch(rest) is None:
            raise BodyFault(
                f"{what} is malformed, or has more than {_MOST_LINE_BYTES} bytes around it"
            )
        self._rest = rest
        return len(data)
