"""Results compared with the targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from comparison.contenders import OURS
from comparison.interleaving import Numbers
from comparison.rows import (
    BEST,
    BIG,
    CPU,
    EQUAL,
    HIGHER_IS_BETTER,
    MEMORY,
    MESSAGE,
    MILLISECOND,
    ONE_PROCESS,
    Row,
    Target,
    with_equal_headers,
    with_load,
    with_one_process,
)

UNITS = {
    "rps": "requests/s",
    "p50": "p50",
    "p99": "p99",
    "seconds": "time",
    MEMORY: "peak memory",
    CPU: "processor time",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target, and whether it was met."""

    row: Row
    target: Target
    against: str
    """The contender on the other side; the best peer's name if the target says BEST."""
    ratio: float | None
    """None if either side has no number."""

    @property
    def is_met(self) -> bool | None:
        """Tell whether the target was met; None if unknown."""
        return None if self.ratio is None else self.target.is_met(self.ratio)

    @property
    def measure(self) -> str:
        """Describe the comparison."""
        return "speed" if self.target.is_speed else UNITS[self.target.measure]

    @property
    def wanted(self) -> str:
        """Describe the target."""
        return f"at {'least' if self.target.at_least else 'most'} {self.target.factor:g}x"


def verdicts(
    row: Row, numbers: Mapping[str, Numbers], peers: Sequence[str], message_bytes: int
) -> list[Verdict]:
    """Compare xlaserve with every target of a row, among the peers that were measured."""
    found = []
    for target in row.targets:
        against = _best(target, numbers, row.peers) if target.against == BEST else target.against
        if target.against in row.peers and target.against not in peers:
            continue
        ours = numbers.get(OURS, {}).get(target.measure)
        theirs = _constant(target, message_bytes) or numbers.get(
            _other(row, target, against), {}
        ).get(target.measure)
        ratio = target.ratio(ours, theirs) if ours and theirs else None
        found.append(Verdict(row, target, against, ratio))
    return found


def _constant(target: Target, message_bytes: int) -> float | None:
    """Return the constant to compare with, or None if the target names a contender."""
    return {MESSAGE: message_bytes, MILLISECOND: 1}.get(target.against)


def _other(row: Row, target: Target, against: str) -> str:
    """Return the name of the contender whose numbers a target is compared with."""
    if target.against == EQUAL:
        return with_equal_headers(OURS)
    if target.against == ONE_PROCESS:
        return with_one_process(OURS)
    return with_load(OURS, row.other_load) if target.against == row.other_load else against


def _best(target: Target, numbers: Mapping[str, Numbers], peers: Sequence[str]) -> str:
    have = [name for name in peers if target.measure in numbers.get(name, {})]
    pick = max if target.measure in HIGHER_IS_BETTER else min
    return pick(have, key=lambda name: float(numbers[name][target.measure]), default=BEST)


def gigabytes_per_second(row: Row, numbers: Numbers, message_bytes: int) -> float | None:
    """Return the throughput of the large message, counted in one direction; None for other rows."""
    if row.name != BIG or "seconds" not in numbers:
        return None
    return message_bytes / float(numbers["seconds"]) / 1e9
