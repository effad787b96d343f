"""Subprocess for tokenizers that may be slow, with limits of time and memory.

Started by `tokenizing.py`; imports nothing else from the server.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import Tokenizer

from xlaserve.language import confining


def begin(first: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that tokenizes text with the tokenizer in the first message."""
    tokenizer = Tokenizer.from_str(first["file"])
    controls = frozenset(first["controls"])

    def answer(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        # Not `encode_batch`, which starts threads; holding the GIL is harmless in this process.
        made = tokenizer.encode(asked["text"], add_special_tokens=asked["adds_special"])
        found: dict[str, Any] = {"ids": made.ids}
        if not controls.isdisjoint(made.ids):
            found["special_tokens_mask"] = made.special_tokens_mask
            found["offsets"] = made.offsets
        return found

    return answer


if __name__ == "__main__":
    confining.serve(begin)
