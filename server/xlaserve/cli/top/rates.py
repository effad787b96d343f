"""Rates of models, from consecutive statistics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xlaserve.cli.asking.models_display import duration, memory_of, number
from xlaserve.dialing.interface import Json


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one version between two polls."""

    name: str
    version: str
    rate: float
    """Answers per second."""
    failed: float
    """Failed requests per second."""
    latency: float
    """Mean latency in milliseconds, or 0."""
    queue: float
    """The part of the latency spent in the queue."""
    rows: float
    """Mean number of rows per execution."""
    memory: int
    """Memory on all devices, in bytes."""


def rates(before: Sequence[Json], after: Sequence[Json], seconds: float) -> Iterator[Rates]:
    """Yield the rates of each version between two sets of statistics."""
    known = {(row.get("name"), row.get("version")): row for row in before}
    for row in after:
        old = known.get((row.get("name"), row.get("version")), {})
        if number(row.get("inference_count")) < number(old.get("inference_count")):
            old = {}  # the model was reloaded, and its counts restarted at 0

        def _grown(name: str, row: Json = row, old: Json = old) -> tuple[int, int]:
            (count, ns), (was, was_ns) = duration(row, name), duration(old, name)
            return max(count - was, 0), max(ns - was_ns, 0)

        answers, ns = _grown("success")
        runs = number(row.get("execution_count")) - number(old.get("execution_count"))
        inferred = number(row.get("inference_count")) - number(old.get("inference_count"))
        yield Rates(
            str(row.get("name", "")),
            str(row.get("version", "")),
            answers / seconds,
            _grown("fail")[0] / seconds,
            ns / answers / 1e6 if answers else 0.0,
            _grown("queue")[1] / answers / 1e6 if answers else 0.0,
            inferred / runs if runs > 0 else 0.0,
            memory_of(row),
        )
