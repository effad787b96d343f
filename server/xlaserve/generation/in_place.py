"""Checks that XLA updates a generator's cache in place."""

from dataclasses import dataclass
from typing import Any

from xlaserve.errors import InvalidModel
from xlaserve.runtime.devices.workspace import shared, workspace_bytes

_LOGITS = 16
"""Maximum size of sampling temporaries, as a multiple of the logits' size."""
_SLACK_BYTES = 1 << 20
_GATHERED = 3
"""Maximum size of a partial step's temporaries, as a multiple of the gathered cache: CPUs convert
BF16 keys and values, which doubles them."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a compiled program in bytes."""

    aliased: int
    temporaries: int
    """All temporaries, including `workspace`."""
    workspace: int = 0
    """Workspace of library calls, which does not belong to the model."""

    @classmethod
    def of(cls, compiled: Any) -> "Memory":
        """Return a program's memory, from XLA's memory analysis and the HLO text."""
        found = compiled.memory_analysis()
        text = compiled.as_text() or ""
        return cls(found.alias_size_in_bytes, found.temp_size_in_bytes, workspace_bytes(text))

    @property
    def booked(self) -> int:
        """Return the temporaries that the model reserves, without shared workspace."""
        return self.temporaries - shared(self.workspace, self.temporaries)

    @property
    def of_model(self) -> int:
        """Return the temporaries without workspace; copying the cache would increase them."""
        return self.temporaries - min(self.workspace, self.temporaries)


def check_aliasing(name: str, memory: Memory, cache_bytes: int, logits_bytes: int | None) -> None:
    """Raise InvalidModel if a program does not update the cache in place.

    Otherwise the cache would need twice the memory, and each token the time of a copy. Without
    `logits_bytes` temporaries are not limited, since a chunk may need many.
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
    """Raise InvalidModel if a step of fewer rows does not update the cache in place.

    It may need temporaries for the gathered cache, possibly converted, and for sampling.
    """
    most = _GATHERED * gathered + _LOGITS * logits_bytes + _SLACK_BYTES
    if memory.aliased < cache_bytes or memory.of_model > most:
        raise InvalidModel(
            f"a step of fewer rows copies the cache: expected {cache_bytes} bytes in place and at "
            f"most {most} of temporaries, got {memory.aliased} and {memory.of_model}"
        )
