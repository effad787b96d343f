"""Whether a compiled program changes the cache of a generator in place, by what XLA says of it."""

import re
from dataclasses import dataclass
from typing import Any

from xlaserve.errors import InvalidModel

_LOGITS = 16
"""Arrays as large as the logits that sampling may take at a time: noise and limits are some."""
_SLACK_BYTES = 1 << 20
_GATHERED = 3
"""Times that a step of fewer rows may take what it gathers: a CPU converts keys and values of BF16,
which doubles them."""

_CALL = re.compile(r"= \((.*?)\) custom-call(?:-start)?\(")
_WORKSPACE = re.compile(r"[su]8\[(\d+)\](?:\{[^}]*\})?$")
"""The last part of the result of a library's call: bytes without a shape. cuBLAS asks for 4 to 32
MiB for every product, however small, as cuDNN and Triton do for theirs."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a compiled program takes."""

    aliased: int
    temporaries: int
    """All of them, with the workspace."""
    workspace: int = 0
    """The most that a library takes for one of its calls: it holds nothing of the model."""

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """Return those of a program, as XLA has analysed it and as its text has them."""
        found = compiled.memory_analysis()
        text = compiled.as_text() or ""
        return cls(found.alias_size_in_bytes, found.temp_size_in_bytes, workspace_bytes(text))

    @property
    def of_model(self) -> int:
        """Return the temporaries without the workspace, among which a copy would be."""
        return self.temporaries - min(self.workspace, self.temporaries)


def workspace_bytes(text: str) -> int:
    """Return the largest workspace of a library's call in the optimized HLO of a program.

    Calls follow one another, and XLA gives all of them the same memory.
    """
    ends = (_WORKSPACE.search(call[1]) for call in _CALL.finditer(text))
    return max((int(end[1]) for end in ends if end), default=0)


def check_aliasing(name: str, memory: Memory, cache_bytes: int, logits_bytes: int | None) -> None:
    """Raise InvalidModel unless a program changes the cache in place.

    One that copies it has it twice, and takes as long for a token as copying takes. Without logits
    it may take more: a chunk may take much for the tokens in it, and a copy for its rows.
    """
    if memory.aliased < cache_bytes:
        raise InvalidModel(
            f"{name} does not change the cache in place: expected {cache_bytes} bytes of its "
            f"results in the memory of its arguments, got {memory.aliased}"
        )
    if logits_bytes is None:
        return
    most = max(cache_bytes, _LOGITS * logits_bytes + _SLACK_BYTES)
    if memory.of_model > most:
        raise InvalidModel(
            f"{name} copies the cache: expected at most {most} bytes of temporaries, got "
            f"{memory.of_model}"
        )


def check_partial(memory: Memory, cache_bytes: int, gathered: int, logits_bytes: int) -> None:
    """Raise InvalidModel unless a step of fewer rows changes the cache in place.

    Its temporaries are what it gathers, in another datatype too, and those of sampling.
    """
    most = _GATHERED * gathered + _LOGITS * logits_bytes + _SLACK_BYTES
    if memory.aliased < cache_bytes or memory.of_model > most:
        raise InvalidModel(
            f"a step of fewer rows copies the cache: expected {cache_bytes} bytes in place and at "
            f"most {most} of temporaries, got {memory.aliased} and {memory.of_model}"
        )
