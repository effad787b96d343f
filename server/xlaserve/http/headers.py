"""Headers as calls read them: looked up in the transport, not copied before.

Several of one name are one list (RFC 9110, 5.3), on both paths alike: a gate that compares the
value of a header which may be there once refuses two of them, whatever their order.
"""

import re

import msgspec
from multidict import CIMultiDictProxy

from xlaserve.net.bounded_cache import MakingCache

_MAX_STARTS = 64
"""Distinct header names that the code looks up."""
_STARTS = MakingCache[str, bytes](lambda name: b"\r\n" + name.lower().encode() + b":", _MAX_STARTS)
"""Name of a header -> beginning of its line, in lower case."""
_HOST = "host"
_AUTHORITY = re.compile(rb"[A-Z]+ +https?://([^/?# ]+)", re.IGNORECASE)
"""Start of a block whose target names the host, whatever Host says (RFC 9112, 3.2.2)."""


class ReadHeaders:
    """Headers of a parsed request."""

    __slots__ = ("_headers",)

    def __init__(self, headers: CIMultiDictProxy[str]) -> None:
        self._headers = headers

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, None where it is absent."""
        values = self._headers.getall(name, ())
        return ", ".join(values) if values else None


# One is made for every request; the bytes that it holds are part of no cycle.
class BlockHeaders(msgspec.Struct, gc=False):
    """The headers in a header block of the fast path, which is read when one is asked for.

    Each line of it is one header: `Heads.learn` saw to that of the block, or of one that differs
    from it by whole lines.
    """

    block: bytes
    fields: dict[bytes, list[bytes]] | None = None
    """Values by lower-case name; None until a repeated header is read."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, None where it is absent."""
        if name == _HOST:
            authority = _AUTHORITY.match(self.block)
            if authority is not None:
                return authority[1].decode(errors="surrogateescape")
        fields = self.fields
        if fields is None:
            # Of most blocks nothing else is read: they hold what is looked for once, or not at all.
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
