"""`xlaserve bench --generate`: latencies of a generator under random arrivals."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
import uvloop

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.load import Timing
from xlaserve.dialing.address import ServerAddress

LONGEST = 2048
"""Default of `--longest`."""
VOCAB = 256
"""Default of `--vocab`: most models have larger vocabularies."""

_FAILED = 1
_PANEL = "With --generate"
_MOST_RATE = 10_000.0
_MOST_CONNECTIONS = 256

Generate: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--generate",
        help="Measure a language model: stream answers to requests at random times, over gRPC.",
        rich_help_panel=_PANEL,
    ),
]
Rate: TypeAlias = Annotated[
    float, typer.Option(help="Requests per second, on average.", rich_help_panel=_PANEL)
]
LengthsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--lengths",
        help='JSON Lines like {"prompt": 161, "answer": 338}, in tokens; drawn by default.',
        rich_help_panel=_PANEL,
    ),
]
Longest: TypeAlias = Annotated[
    int,
    typer.Option(
        min=2,
        help="Maximum of prompt plus answer tokens when lengths are drawn.",
        rich_help_panel=_PANEL,
    ),
]
Vocab: TypeAlias = Annotated[
    int,
    typer.Option(
        min=1, max=1 << 31, help="Exclusive upper bound of token ids.", rich_help_panel=_PANEL
    ),
]
Seed: TypeAlias = Annotated[
    int,
    typer.Option(min=0, help="Seed for times, lengths and tokens.", rich_help_panel=_PANEL),
]

_CLOSED = {
    "concurrency": "--concurrency",
    "streams": "--streams",
    "shape": "--shape",
    "batch": "--batch",
    "binary": "--binary, --json-tensors",
    "svg_file": "--svg",
}
"""Options of closed-loop benchmarks, which do not apply to generators."""
_OPEN = {name: f"--{name}" for name in ("rate", "lengths", "longest", "vocab", "seed")}
"""Options that need --generate."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Options that determine the generated requests."""

    rate: float
    lengths: Path | None
    longest: int
    vocab: int
    seed: int
    connections: int


def check_options(context: typer.Context, *, generate: bool) -> None:
    """Raise BenchmarkRefused for options that would have no effect."""
    given = {name for name in context.params if _is_given(context, name)}
    if generate and "lengths" in given and "longest" in given:
        raise BenchmarkRefused(
            "--longest: leave it out with --lengths, it limits lengths drawn at random"
        )
    wrong = [flag for name, flag in (_CLOSED if generate else _OPEN).items() if name in given]
    if wrong:
        with_or_without = "with" if generate else "without"
        raise BenchmarkRefused(f"{', '.join(wrong)}: no effect {with_or_without} --generate")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def measure_generation(
    address: ServerAddress,
    model: str,
    version: str,
    *,
    timing: Timing,
    given: Arrivals,
    json_file: Path | None,
) -> None:
    """Measure a generator and print the results; exit with 1 if a request was not answered."""
    # These import grpclib, which would slow down the other commands.
    from xlaserve.bench.generation import lengths, run, schedule
    from xlaserve.cli.bench.generate_display import progress, show

    if address.rest:
        raise BenchmarkRefused(f"{address.url}: --generate needs gRPC, as host:port")
    if not 0 < given.rate <= _MOST_RATE:
        expected = f"more than 0 and at most {_MOST_RATE:g}"
        raise BenchmarkRefused(f"--rate: expected {expected}, got {given.rate:g}")
    if given.connections > _MOST_CONNECTIONS:
        raise BenchmarkRefused(
            f"--connections: expected at most {_MOST_CONNECTIONS}, got {given.connections}"
        )
    pairs = (
        lengths.drawn(given.seed, given.longest)
        if given.lengths is None
        else itertools.cycle(lengths.read(given.lengths))
    )
    planned = schedule.poisson(
        given.rate, pairs, warmup=timing.warmup, duration=timing.duration, seed=given.seed
    )
    job = run.Job(address, model, version, planned, given.vocab, given.connections, timing.timeout)
    with progress(planned):
        report = uvloop.run(run.run(job))
    show(report)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(address.url), indent=2) + "\n")
    if report.figures.failed or report.figures.late:
        raise typer.Exit(_FAILED)
