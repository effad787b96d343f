"""The process of a tokenizer that may take long, with limits of time and memory.

Started by `tokenizing.py` as a script of its own, which needs nothing of the server.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from xlaserve.language import confining
else:
    sys.path.append(str(Path(__file__).parent))
    import confining


def begin(first: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Return what makes tokens of a text, as the file of the first message says."""
    tokenizer = Tokenizer.from_str(first["file"])
    controls = frozenset(first["controls"])

    def answer(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        # Not a batch, which begins threads; it keeps a lock that nobody else waits for.
        made = tokenizer.encode(asked["text"], add_special_tokens=asked["adds_special"])
        found: dict[str, Any] = {"ids": made.ids}
        if not controls.isdisjoint(made.ids):
            found["special_tokens_mask"] = made.special_tokens_mask
            found["offsets"] = made.offsets
        return found

    return answer


if __name__ == "__main__":
    confining.serve(begin)
