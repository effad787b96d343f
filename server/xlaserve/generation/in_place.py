"""Checks that XLA updates the cache of a generator in place."""

from dataclasses import dataclass
from typing import Any

from xlaserve.errors import InvalidModel
from xlaserve.runtime.devices.workspace import shared, workspace_bytes

_LOGITS = 16
"""Temporaries allowed for sampling, in arrays of the logits' size."""
_SLACK_BYTES = 1 << 20
_GATHERED = 3
"""Times that a step of fewer rows may take what it gathers: a CPU converts keys and values of BF16,
which doubles them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a compiled program takes."""

    aliased: int
    temporaries: int
    """All temporaries, workspace included."""
    workspace: int = 0
    """Workspace of library calls, outside of the model."""

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """Return a program's memory from XLA's analysis and its text."""
        found = compiled.memory_analysis()
        text = compiled.as_text() or ""
        return cls(found.alias_size_in_bytes, found.temp_size_in_bytes, workspace_bytes(text))

    @property
    def booked(self) -> int:
        """Return the temporaries that the model reserves: without the device's workspace."""
        return self.temporaries - shared(self.workspace, self.temporaries)

    @property
    def of_model(self) -> int:
        """Return the temporaries without the workspace, among which a copy would be."""
        return self.temporaries - min(self.workspace, self.temporaries)


def check_aliasing(name: str, memory: Memory, cache_bytes: int, logits_bytes: int | None) -> None:
    """Raise InvalidModel unless a program changes the cache in place.

    One that copies it has it twice, and takes as long for a token as copying takes. Without logits
    it may take more: a chunk may take much for the tokens in it, and a copy for its rows.
    """
    if memory.aliased < cache_bytes:
        raise InvalidModel(
            f"{name} does not update the cache in place: expected {cache_bytes} bytes of its"
            f" results to alias its arguments, got {memory.aliased}"
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
