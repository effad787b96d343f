"""The verdict on whether the rows of a batch see one another."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Independence(StrEnum):
    """Whether each row of every output is computed from the same row of the inputs alone."""

    PROVED = "proved"
    """It is so, at every batch size and in every place of a batch."""
    MIXED = "mixed"
    """An operation is known to let a row depend on others, its place, or the size of the batch."""
    UNKNOWN = "unknown"
    """There is no rule for an operation, or no proof."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the analysis of one computation."""

    independence: Independence
    output: str = ""
    """The name of the first output that is not proved."""
    operation: str = ""
    """Operation that prevents the proof, as StableHLO names it: `stablehlo.reduce`."""
    reason: str = ""
    """One clause: `reduces over the rows`."""
    location: str = ""
    """The author's line, `model.py:12`; empty where the computation does not say."""
    loops_follow_rows: bool = False
    """Whether the length of a loop depends on rows: padding must repeat a real row, since one of
    zeros may never end."""
    loops_follow_inputs: bool = False
    """Whether the trip count of some loop is not known to be a constant."""

    def __str__(self) -> str:
        """Say it in one line, for a log or a terminal."""
        place = f" ({self.location})" if self.location else ""
        operation = f": {self.operation} {self.reason}{place}" if self.operation else ""
        reason = f": {self.reason}" if self.reason and not self.operation else ""
        output = f", seen in output '{self.output}'" if self.output else ""
        return f"{self.independence}{operation}{reason}{output}"


_WORST_FIRST = (Independence.MIXED, Independence.UNKNOWN, Independence.PROVED)


def worst(by_platform: Mapping[str, Verdict]) -> Verdict:
    """Return the verdict that holds on all platforms, with the name of one where others differ."""
    verdicts = list(by_platform.values())
    name, found = min(
        by_platform.items(), key=lambda item: _WORST_FIRST.index(item[1].independence)
    )
    differ = any(one.independence is not found.independence for one in verdicts)
    return replace(
        found,
        reason=f"{found.reason}, on {name}" if differ else found.reason,
        loops_follow_rows=any(one.loops_follow_rows for one in verdicts),
        loops_follow_inputs=any(one.loops_follow_inputs for one in verdicts),
    )
