"""Estimates of the memory that parsing a text takes, made beforehand."""

from functools import partial

from xlaserve.http.json.json_text import count_octets
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
