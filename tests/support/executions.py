"""Executed requests in the form that statistics take."""

from dataclasses import dataclass

from xlaserve.serving.statistics import VersionStatistics


@dataclass(frozen=True)
class Ran:
    """A request that ran alone, doubling as its execution; times in nanoseconds."""

    rows: int = 1
    started_ns: int = 0
    submitted_ns: int = 0
    begun_ns: int = 0
    ended_ns: int = 0


def succeed(
    statistics: VersionStatistics,
    rows: int = 1,
    times: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
    now_ns: int = 0,
) -> None:
    """Record a successful request with its start, submission, execution and answer times."""
    *of_request, ended = times
    ran = Ran(rows, *of_request)
    statistics.succeeded(ran, ran, ended, now_ns)
