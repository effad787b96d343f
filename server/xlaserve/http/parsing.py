"""Parsing texts within the memory that it takes, which is charged beforehand."""

from collections.abc import Callable
from functools import partial
from typing import Any

from xlaserve.http.json.json_text import count_octets
from xlaserve.http.messages import HttpRequest, read_json
from xlaserve.http.threads import INLINE_BYTES, OffLoop
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.tensors import BYTES

_COPIES = 3
"""Maximum number of copies of a text: without body, strings, brackets."""
_COPIES_OF_STRINGS = 5
"""With strings in it: as strings, and as octets."""
_NUMBER_BYTES = 8
_STRING_BYTES = 128
"""Bytes Python adds to those two for each string, and a reference to each."""

_COPIES_OF_OBJECTS = 4
"""Copies of an ASCII body while it is parsed: its strings, and files decoded from base64."""
_COPIES_OF_WIDE = 8
"""The same, if the body has a character that Python stores in four bytes."""
_CHUNK = 1 << 16


async def read_whole(
    threads: OffLoop,
    request: HttpRequest,
    kind: Any,
    made: Callable[[Any], Any] = lambda found: found,
    *,
    max_depth: int,
) -> Any:
    """Return what is `made` of a JSON body as a msgspec type, charged until its request ends.

    For bodies without tensors: settings, regions, loads with their files. Raises InvalidBody,
    BudgetExhausted, and what `made` raises.
    """
    body = await request.read()
    size = len(body)
    if size > INLINE_BYTES:
        copies = await threads.run(size, partial(_copies, body))
        request.grow(copies * size, "the parsed body")
    return await threads.run(size, lambda: made(read_json(body, kind, max_depth=max_depth)))


def _copies(body: memoryview) -> int:
    for start in range(0, len(body), _CHUNK):
        # What is cut in two is taken for the whole: an escape of a character has six.
        piece = bytes(body[start : start + _CHUNK + 1])
        if not piece.isascii() or b"\\u" in piece:
            return _COPIES_OF_WIDE
    return _COPIES_OF_OBJECTS


async def parsed_bytes(threads: OffLoop, info: ModelInfo, text: memoryview) -> int:
    """Return how many bytes JSON or CSV takes at most while it is parsed for a model.

    There are as many elements as commas, and one. 0 for a short text, parsed in a moment.
    """
    if len(text) <= INLINE_BYTES:
        return 0
    has_strings = any(spec.datatype is BYTES for spec in info.inputs)
    return await threads.run(len(text), partial(_most_bytes, text, has_strings=has_strings))


def _most_bytes(text: memoryview, *, has_strings: bool) -> int:
    elements = count_octets(text, b",") + 1
    if has_strings:
        return _COPIES_OF_STRINGS * len(text) + elements * _STRING_BYTES
    return _COPIES * len(text) + elements * _NUMBER_BYTES
