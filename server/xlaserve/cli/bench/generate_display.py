"""The progress and results of a generator benchmark on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from xlaserve.bench.generation.figures import Figures, Percentiles
from xlaserve.bench.generation.run import Report
from xlaserve.bench.generation.schedule import Schedule

_COLUMNS = ("milliseconds", "p50", "p90", "p99", "max")
_BUSY = 0.9
"""Share of a CPU core above which the client may limit the measured throughput."""
_INTEGRAL = 100.0
"""Milliseconds from which fractions are omitted."""


@contextmanager
def progress(schedule: Schedule) -> Iterator[None]:
    """Show progress on stderr, if it is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    seconds = schedule.warmup + schedule.duration
    # Refresh rarely: the display takes CPU time from the client, which affects the measurement.
    with console.status(
        f"{len(schedule.arrivals)} requests within {seconds:g} s, then their answers",
        refresh_per_second=2,
    ):
        yield


def show(report: Report) -> None:
    """Print the results."""
    console, figures, schedule = Console(), report.figures, report.schedule
    _say(
        console,
        f"{report.model}, grpc: {schedule.rate:g} requests/s for {schedule.duration:g} s, "
        f"Poisson, seed {schedule.seed}",
    )
    answers = sum(one.lengths.answer for one in schedule.arrivals if one.counted)
    _say(
        console,
        f"{figures.requests} requests, on average {figures.prompt_tokens / figures.requests:.0f} "
        f"tokens of prompt and {answers / figures.requests:.0f} of answer",
    )
    console.print(_table(figures))
    _say(
        console,
        f"{figures.tokens_per_second:.1f} tokens/s in {figures.seconds:.1f} s; "
        f"{figures.answered} answered, {figures.late} late, {figures.failed} failed; "
        f"client {figures.client_cpu:.0%} of a core, at most {figures.client_lag_ms:.0f} ms behind",
    )
    for text in _remarks(figures):
        _say(console, text)


def _remarks(figures: Figures) -> Iterator[str]:
    if figures.late:
        yield (
            f"late: {figures.late} requests were unfinished when the measurement ended; their"
            " latencies are lower bounds"
        )
    if figures.short:
        yield (
            f"{figures.short} answers were shorter than requested: the model has fewer positions,"
            " or ignores the parameter 'ignore_eos'"
        )
    if figures.client_cpu > _BUSY:
        yield "the client was saturated, the server may be faster than measured"
    for error, count in figures.errors.items():
        yield f"{count} x {error}"


def _table(figures: Figures) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for name, found in (
        ("first token", figures.first_token_ms),
        ("between tokens", figures.between_tokens_ms),
        ("whole answer", figures.answer_ms),
    ):
        table.add_row(name, *_cells(found))
    return table


def _cells(found: Percentiles) -> list[str]:
    return [_digits(found[name]) if name in found else "-" for name in _COLUMNS[1:]]


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= _INTEGRAL else f"{value:.3g}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
