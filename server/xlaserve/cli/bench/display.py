"""The progress and results of a benchmark on a terminal."""

from typing import Self

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from xlaserve.bench.load import Step, Timing
from xlaserve.bench.results import Result
from xlaserve.bench.run import Report

_INTEGRAL = 100.0
"""Milliseconds from which fractions are omitted."""

_COLUMNS = ("in flight", "answers/s", "p50 ms", "p90", "p95", "p99", "max", "errors", "client")
_BUSY = 0.9
"""Share of a CPU core above which the client may limit the measured throughput."""


class BenchDisplay:
    """A progress bar on stderr that follows the clock, and results on stdout."""

    def __init__(self, timing: Timing) -> None:
        self._seconds = timing.warmup + timing.duration
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            # An animation would take CPU time from the client, which affects the measurement.
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("connecting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def step(self, step: Step, index: int, steps: int) -> None:
        """Show which step is being measured."""
        self._progress.update(
            self._bar,
            description=f"{step.concurrency} in flight ({step}), {self._seconds:g} s each",
            total=steps,
            completed=index,
        )

    def show(self, report: Report) -> None:
        """Print the results."""
        console = Console()
        sent = ", ".join(f"{name} {text}" for name, text in report.inputs.items())
        console.print(f"{report.model}, {report.protocol}: {sent}", highlight=False, soft_wrap=True)
        console.print(_table(report))
        for result in report.results:
            if result.client_cpu > _BUSY:
                console.print(
                    f"{result.step.concurrency} in flight: the client was saturated, the server"
                    " may be faster than measured",
                    soft_wrap=True,
                )
            for status, count in result.errors.items():
                console.print(
                    f"{result.step.concurrency} in flight: {count} x {status}",
                    highlight=False,
                    soft_wrap=True,
                    markup=False,
                )


def _table(report: Report) -> Table:
    # Without column lines, so that the table fits into 80 columns.
    table = Table(box=SIMPLE, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for result in report.results:
        table.add_row(*_row(result))
    return table


def _row(result: Result) -> list[str]:
    latencies = [result.latency_ms.get(name) for name in ("p50", "p90", "p95", "p99", "max")]
    return [
        f"{result.step.concurrency} ({result.step})",
        f"{result.answers_per_second:.0f}",
        *("-" if value is None else _digits(value) for value in latencies),
        str(sum(result.errors.values())),
        f"{result.client_cpu:.0%}",
    ]


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= _INTEGRAL else f"{value:.3g}"
