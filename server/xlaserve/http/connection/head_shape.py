"""Regular expressions for the header blocks of a connection, as a shortcut to their plans.

A client usually sends the same headers in the same order. After several header blocks with the same
essence (the block without idle headers and length), a regular expression is compiled, and one match
replaces the comparison line by line. Blocks that do not match are compared line by line.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from xlaserve.http.connection.plans import (
    HEAD_BYTES,
    IDLE,
    IS_LENGTH,
    Plan,
    Plans,
    essence_of,
    is_number,
    role_of,
)
from xlaserve.net.bounded_cache import MakingCache

IN_A_ROW = 8
"""Consecutive header blocks with the same essence before a regular expression is compiled, which
costs as much as about ten line-by-line comparisons. The number doubles for each further expression,
so that clients with ever-changing headers cost little."""
_MAX_SHAPES = 64
_SHAPE_BYTES = 1 << 10
"""No expression is compiled for longer header blocks: it would take up to 2 ms."""
_VALUE = b"[ -~]*"
"""Matches the value of an idle header: printable ASCII."""
_LENGTH = b" *([0-9]{1,9})"

_MATCHES: Final = MakingCache[bytes, Callable[[bytes], re.Match[bytes] | None]](
    lambda pattern: re.compile(pattern).fullmatch, _MAX_SHAPES
)
"""Compiled match function by pattern, shared by all connections."""


class _Shape(NamedTuple):
    match: Callable[[bytes], re.Match[bytes] | None]
    key: bytes
    """Essence of the matching header blocks."""
    varies: bool
    """Whether the matching header blocks have idle headers."""


class ShapedPlans:
    """Finds plans for the header blocks of one connection."""

    __slots__ = ("_in_a_row", "_key", "_needed", "_plans", "_shape")

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._shape: _Shape | None = None
        self._key = b""
        """Essence of the last header block that was compared line by line."""
        self._in_a_row = 0
        """Number of consecutive header blocks with that essence."""
        self._needed = IN_A_ROW

    def find(self, head: bytes) -> Plan | None:
        """Return the plan for a header block, or None, as `Plans.find` does."""
        shape = self._shape
        if shape is not None and len(head) <= HEAD_BYTES:
            found = shape.match(head)
            if found is not None:
                return self._plans.find_alike(head, shape.key, int(found[1]), shape.varies)
        return self._find(head)

    def _find(self, head: bytes) -> Plan | None:
        if not head or len(head) > HEAD_BYTES:
            return None
        essence = essence_of(head)
        if essence is None:
            return None
        key, length, varies = essence
        plan = self._plans.find_alike(head, key, length, varies)
        if plan is not None:
            self._in_a_row = self._in_a_row + 1 if key == self._key else 1
            self._key = key
            if self._in_a_row >= self._needed and len(head) <= _SHAPE_BYTES:
                self._in_a_row = 0
                self._needed *= 2
                self._shape = _Shape(_MATCHES[_pattern(head)], key, varies)
        return plan


def _pattern(head: bytes) -> bytes:
    """Return the pattern for a header block that has an essence and a length."""
    first, *lines = head.split(b"\r\n")
    parts, has_length = [re.escape(first)], False
    for line in lines:
        end = line.find(b":") + 1
        role = role_of(line, end - 1)
        if role == IDLE:
            parts.append(re.escape(line[:end]) + _VALUE)
        elif role == IS_LENGTH and not has_length and is_number(line[end:]):
            parts.append(re.escape(line[:end]) + _LENGTH)
            has_length = True
        else:
            parts.append(re.escape(line))
    return b"\r\n".join(parts)
