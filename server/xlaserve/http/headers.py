"""Header lookup for calls, directly in the parsed or raw headers.

Repeated headers are joined into one list (RFC 9110, 5.3) on both paths. A gate that compares a
single-valued header therefore refuses a repeated one, whatever the order.
"""

import re

import msgspec
from multidict import CIMultiDictProxy

from xlaserve.net.bounded_cache import MakingCache

_MAX_STARTS = 64
"""Maximum number of distinct header names that the code looks up."""
_STARTS = MakingCache[str, bytes](lambda name: b"\r\n" + name.lower().encode() + b":", _MAX_STARTS)
"""Start of a header line in lower case, by header name."""
_HOST = "host"
_AUTHORITY = re.compile(rb"[A-Z]+ +https?://([^/?# ]+)", re.IGNORECASE)
"""A request line whose target contains the host, which overrides Host (RFC 9112, 3.2.2)."""


class ReadHeaders:
    """Headers of a parsed request."""

    __slots__ = ("_headers",)

    def __init__(self, headers: CIMultiDictProxy[str]) -> None:
        self._headers = headers

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, or None if it is absent."""
        values = self._headers.getall(name, ())
        return ", ".join(values) if values else None


# One is created per request; `gc=False` is safe, since it is never part of a reference cycle.
class BlockHeaders(msgspec.Struct, gc=False):
    """The headers of a raw header block of the fast path, parsed on first use.

    Each line is one header: `Heads.learn` checked this block, or one that differs only in whole
    lines.
    """

    block: bytes
    fields: dict[bytes, list[bytes]] | None = None
    """Values by lower-case name; None until the code looks up a repeated header."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, or None if it is absent."""
        if name == _HOST:
            authority = _AUTHORITY.match(self.block)
            if authority is not None:
                return authority[1].decode(errors="surrogateescape")
        fields = self.fields
        if fields is None:
            # Shortcut: in most blocks the requested header occurs once or not at all.
            start = _STARTS[name]
            block = self.block
            lowered = block.lower()
            found = lowered.find(start)
            if found < 0:
                return None
            begin = found + len(start)
            if lowered.find(start, begin) < 0:
                value = block[begin : block.find(b"\r\n", begin)].strip(b" \t")
                return value.decode(errors="surrogateescape")
            fields = self.fields = {}
            for line in block.split(b"\r\n")[1:-2]:
                field, _, value = line.partition(b":")
                fields.setdefault(field.lower(), []).append(value.strip(b" \t"))
        values = fields.get(name.lower().encode())
        return b", ".join(values).decode(errors="surrogateescape") if values else None
