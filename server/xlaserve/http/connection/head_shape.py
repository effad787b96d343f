"""The shape of request heads: everything but idle header values and the length.

A client writes the same headers in the same order each time. Once some heads in a row were of one
essence, their shape is a regular expression: one match takes the place of a look at each line. It
only accepts: what does not match is looked at line by line, as the first ones were.
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
"""Heads of one essence after which a shape is made: to make one takes as long as some ten of them.
The next one takes twice as many, so that a client of ever new shapes pays little for that."""
_MAX_SHAPES = 64
_SHAPE_BYTES = 1 << 10
"""Longer heads have no shape: to make one takes up to 2 ms."""
_VALUE = b"[ -~]*"
"""The plain characters of an idle header's value."""
_LENGTH = b" *([0-9]{1,9})"

_MATCHES: Final = MakingCache[bytes, Callable[[bytes], re.Match[bytes] | None]](
    lambda pattern: re.compile(pattern).fullmatch, _MAX_SHAPES
)
"""Function that matches heads of a shape, by its pattern; of all connections."""


class _Shape(NamedTuple):
    match: Callable[[bytes], re.Match[bytes] | None]
    key: bytes
    """Essence of its header blocks."""
    varies: bool
    """Whether they have idle headers."""


class ShapedPlans:
    """Finds the plans of the heads of one connection."""

    __slots__ = ("_in_a_row", "_key", "_needed", "_plans", "_shape")

    def __init__(self, plans: Plans) -> None:
        self._plans = plans
        self._shape: _Shape | None = None
        self._key = b""
        """Essence of the last header block that was compared line by line."""
        self._in_a_row = 0
        """Number of consecutive equal ones."""
        self._needed = IN_A_ROW

    def find(self, head: bytes) -> Plan | None:
        """Return the plan of a head, as `Plans.find` does."""
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
    """Return the pattern of a header block with an essence and a length."""
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
