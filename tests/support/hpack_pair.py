"""Our HPACK decoder and the hpack library's, compared on one connection."""

from typing import TypeAlias

import hpack
from hpack.exceptions import HPACKError, OversizedHeaderListError
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from support.frames import integer
from xlaserve.grpc.http2.header_fields import Field
from xlaserve.grpc.http2.hpack import BlockTooLarge, Decoder, MalformedBlock
from xlaserve.grpc.http2.layouts import Layouts

_ALL = 1 << 30

Lines: TypeAlias = list[tuple[bytes, bytes]]

huffman = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode


def string(octets: bytes, coded: bool) -> bytes:
    """Encode a string (RFC 7541, 5.2)."""
    if coded:
        octets = huffman(octets)
        return integer(len(octets), 7, 0x80) + octets
    return integer(len(octets), 7) + octets


class Pair:
    """Our decoder and the reference decoder for the same connection."""

    def __init__(self, limit: int = 1 << 10) -> None:
        self.ours = Decoder(limit)
        self.reference = hpack.Decoder(max_header_list_size=limit)

    def decoded(self, block: bytes) -> list[Field] | str:
        """Decode a block, or return why it is rejected."""
        try:
            found = self.ours.decode(block)
        except BlockTooLarge:
            return "too large"
        except MalformedBlock:
            return "malformed"
        assert all(
            (name.octets, 32 + len(name.octets) + len(value)) == (name.text.encode("latin-1"), size)
            for _, value, size, name in found
        )
        return found

    def ours_of(self, block: bytes) -> Lines | str:
        """Return the names and values that our decoder finds, or why it rejects the block."""
        found = self.decoded(block)
        return found if isinstance(found, str) else _lines(found)

    def reference_of(self, block: bytes) -> Lines | str:
        """Decode a block with the reference, or return why it rejects the block."""
        try:
            found = self.reference.decode(block, raw=True)
        except OversizedHeaderListError:
            return "too large"
        # For truncated blocks, the library raises a few builtin exceptions.
        except (HPACKError, IndexError, ValueError):
            return "malformed"
        return [(bytes(name), bytes(value)) for name, value in found]

    def tables(self) -> tuple[list[Lines], list[int]]:
        """Return both dynamic tables and their sizes."""
        ours, theirs = self.ours, self.reference.header_table
        return (
            [
                [(name.octets, value) for _, value, _, name in ours.table.newest(_ALL)],
                [(bytes(name), bytes(value)) for name, value in theirs.dynamic_entries],
            ],
            [ours.table.size(), theirs._current_size],
        )

    def compare(self, *blocks: bytes) -> "list[Lines | str]":
        """Decode blocks up to the first rejected one; return the outcomes."""
        outcomes = []
        for block in blocks:
            outcome = self.reference_of(block)
            assert outcome == self.ours_of(block), block.hex()
            outcomes.append(outcome)
            if isinstance(outcome, str):
                break
            (ours, theirs), (our_size, their_size) = self.tables()
            assert (theirs, their_size) == (ours, our_size)
        return outcomes


class LayoutPair(Pair):
    """A pair in which our side reads blocks by their cached layouts where possible."""

    def __init__(self, limit: int = 1 << 16) -> None:
        super().__init__(limit)
        self.layouts: Layouts[list[bytes]] = Layouts(self.ours, limit)
        self.read = 0
        """Number of blocks read by layout."""

    def ours_of(self, block: bytes) -> Lines | str:
        """Read a block by layout, or decode it and cache its layout."""
        before = self.ours.table.changes, self.ours.table.newest(_ALL)
        values = self.layouts.read(block)
        if values is not None:
            self.read += 1
            assert self.layouts.layout is not None
            return list(zip(self.layouts.layout.kind, values.all(), strict=True))
        assert before == (self.ours.table.changes, self.ours.table.newest(_ALL))
        found = self.decoded(block)
        if isinstance(found, str):
            return found
        lines = _lines(found)
        if not any(token.startswith("\n") for token, *_ in found):  # as if a route matched
            self.layouts.note([name for name, _ in lines], block, found)
        return lines


def _lines(found: list[Field]) -> Lines:
    return [(name.octets, value) for _, value, _, name in found]
