"""Parsing of JSON and CSV bodies, with their memory charged in advance."""

from collections.abc import Callable
from functools import partial
from typing import Any

from xlaserve.http.json.json_text import count_octets
from xlaserve.http.messages import HttpRequest, read_json
from xlaserve.http.threads import INLINE_BYTES, OffLoop
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.tensors import BYTES

_COPIES = 3
"""Maximum number of copies of a text that exist while a text without strings is parsed."""
_COPIES_OF_STRINGS = 5
"""The same for a text with strings, which also exist as str and as bytes."""
_NUMBER_BYTES = 8
_STRING_BYTES = 128
"""Overhead of the str and bytes objects of each string, including references."""

_COPIES_OF_OBJECTS = 4
"""Copies of an ASCII body while it is parsed: its strings, and files decoded from base64."""
_COPIES_OF_WIDE = 8
"""Copies of a body with a character that Python stores in four bytes."""
_CHUNK = 1 << 16


async def read_whole(
    threads: OffLoop,
    request: HttpRequest,
    kind: Any,
    made: Callable[[Any], Any] = lambda found: found,
    *,
    max_depth: int,
) -> Any:
    """Parse a JSON body as a msgspec type and pass it to `made`; return the result.

    The parsed body stays charged until the request ends. For bodies without tensors: settings,
    shared-memory regions, model loads with files. Raises InvalidBody, BudgetExhausted, and the
    exceptions of `made`.
    """
    body = await request.read()
    size = len(body)
    if size > INLINE_BYTES:
        copies = await threads.run(size, partial(_copies, body))
        request.grow(copies * size, "the parsed body")
    return await threads.run(size, lambda: made(read_json(body, kind, max_depth=max_depth)))


def _copies(body: memoryview) -> int:
    for start in range(0, len(body), _CHUNK):
        # Pieces overlap by one byte, so that `\u` is found even where two pieces meet.
        piece = bytes(body[start : start + _CHUNK + 1])
        if not piece.isascii() or b"\\u" in piece:
            return _COPIES_OF_WIDE
    return _COPIES_OF_OBJECTS


async def parsed_bytes(threads: OffLoop, info: ModelInfo, text: memoryview) -> int:
    """Return the maximum memory in bytes for parsing JSON or CSV input of a model.

    The number of elements is the number of commas plus one. Returns 0 for a short text.
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
