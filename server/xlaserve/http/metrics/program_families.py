"""Metrics of the compilation cache: a directory and a shared store."""

from collections.abc import Callable, Iterable, Mapping

from xlaserve.http.metrics.metric_family import Family, Row, counter
from xlaserve.runtime.programs.program_counts import ProgramCounts

_PLACE = "place"


def _of_each(
    read: Callable[[ProgramCounts], Mapping[str, float] | float],
) -> Callable[[Mapping[str, ProgramCounts]], Iterable[Row]]:
    """Return a reader that yields a count by location or outcome."""

    def rows(places: Mapping[str, ProgramCounts]) -> Iterable[Row]:
        for place, counts in places.items():
            label, found = f'{_PLACE}="{place}"', read(counts)
            if not isinstance(found, Mapping):
                yield "", label, found
                continue
            for outcome, value in found.items():
                yield "", f'{label},outcome="{outcome}"', value

    return rows


OF_PROGRAMS: tuple[Family[Mapping[str, ProgramCounts]], ...] = (
    counter(
        "xlaserve_program_lookups_total",
        "Lookups of compiled programs in the directory (compilation_cache_directory) and the store "
        "(compilation_cache_url): hit, miss, unusable, or unanswered by the store; this and the"
        " following are absent if not configured",
        _of_each(
            lambda counts: {
                "hit": counts.hits,
                "miss": counts.misses,
                "unusable": counts.unusable,
                "unanswered": counts.unanswered,
            }
        ),
        _PLACE,
        "outcome",
    ),
    counter(
        "xlaserve_program_lookup_seconds_total",
        "Time of these lookups, including reading the programs found",
        _of_each(lambda counts: counts.seconds),
        _PLACE,
    ),
    counter(
        "xlaserve_program_read_bytes_total",
        "Bytes of programs found",
        _of_each(lambda counts: counts.read_bytes),
        _PLACE,
    ),
    counter(
        "xlaserve_program_writes_total",
        "Writes of compiled programs, successful and failed",
        _of_each(lambda counts: {"written": counts.written, "failed": counts.failures}),
        _PLACE,
        "outcome",
    ),
    counter(
        "xlaserve_program_written_bytes_total",
        "Bytes of programs written",
        _of_each(lambda counts: counts.written_bytes),
        _PLACE,
    ),
)
