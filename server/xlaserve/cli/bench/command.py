"""`xlaserve bench`: latency and throughput of a V2 server at a sequence of loads."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.load import Step, Timing
from xlaserve.cli.asking.connection import (
    URL_HELP,
    TlsCa,
    TlsCertificate,
    TlsInsecure,
    TlsKey,
    TokenFile,
    server_address,
)
from xlaserve.cli.bench.generate import (
    LONGEST,
    VOCAB,
    Arrivals,
    Generate,
    LengthsFile,
    Longest,
    Rate,
    Seed,
    Vocab,
    check_options,
    measure_generation,
)
from xlaserve.dialing.address import TlsFiles
from xlaserve.tensors import Shape

_FAILED = 1
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "": 1.0}
_MAX_SECONDS = 600.0
"""Limits memory, since every latency is kept to compute percentiles."""
_MAX_CONCURRENCY = 4096
_DEFAULT_CONCURRENCY = "1,4,16"


def bench(  # noqa: PLR0917, typer reads the parameters of a command from its signature
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    url: Annotated[str, typer.Option(help=URL_HELP)] = "127.0.0.1:8001",
    concurrency: Annotated[
        str | None,
        typer.Option(help=f"Requests in flight in each step. [default: {_DEFAULT_CONCURRENCY}]"),
    ] = None,
    streams: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum requests in flight per gRPC connection; all by default."),
    ] = None,
    connections: Annotated[
        int | None,
        typer.Option(min=1, help="gRPC connections to spread requests over; not for REST."),
    ] = None,
    duration: Annotated[str, typer.Option(help="Duration of each step: 5s, 500ms, 1m.")] = "5s",
    warmup: Annotated[
        str, typer.Option(help="Duration of unmeasured warm-up requests before each step.")
    ] = "1s",
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            help="NAME=1,16: the shape of an input with dynamic dimensions; may be repeated.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Size of a dynamic first dimension.")] = 1,
    binary: Annotated[
        bool | None,
        typer.Option(
            "--binary/--json-tensors",
            help="Encoding of tensors over REST. [default: binary]",
            show_default=False,
        ),
    ] = None,
    model_version: Annotated[
        str, typer.Option("--version", help="Defaults to the newest version.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for a connection, and for the last answers.")
    ] = 30.0,
    tls_ca: TlsCa = None,
    tls_certificate: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_insecure: TlsInsecure = False,
    token_file: TokenFile = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this JSON file.")
    ] = None,
    svg_file: Annotated[
        Path | None,
        typer.Option("--svg", help="Write a chart of latency against load to this file."),
    ] = None,
    generate: Generate = False,
    rate: Rate = 1.0,
    lengths: LengthsFile = None,
    longest: Longest = LONGEST,
    vocab: Vocab = VOCAB,
    seed: Seed = 1,
) -> None:
    """Measure latency and throughput of a model; exit with 1 if a request failed."""
    check_options(context, generate=generate)
    # These import aiohttp and grpclib, which would slow down the other commands.
    from xlaserve.bench import run
    from xlaserve.bench.chart import latency_chart
    from xlaserve.bench.target import target
    from xlaserve.cli.bench.display import BenchDisplay

    tls = TlsFiles(tls_ca, tls_certificate, tls_key, tls_insecure)
    address = server_address(url, tls, token_file)
    if generate:
        seconds = Timing(_seconds("--warmup", warmup), _seconds("--duration", duration), timeout)
        arrivals = Arrivals(rate, lengths, longest, vocab, seed, connections or 1)
        measure_generation(
            address, model, model_version, timing=seconds, given=arrivals, json_file=json_file
        )
        return
    measured = target(address, model, model_version, timeout=timeout, binary=binary)
    steps = _steps(concurrency, streams, connections, multiplexes=measured.multiplexes)
    timing = Timing(_seconds("--warmup", warmup), _seconds("--duration", duration), timeout)
    display = BenchDisplay(timing)
    job = run.Job(model, measured, steps, timing, _shapes(shape), batch)
    with display:
        report = uvloop.run(run.run(job, display.step))
    display.show(report)
    for path, text in (
        (json_file, json.dumps(report.as_json(url), indent=2) + "\n"),
        (svg_file, latency_chart(f"{model}, {report.protocol}", report.results)),
    ):
        if path is not None:
            path.write_text(text)
    if any(result.errors or not result.answers for result in report.results):
        raise typer.Exit(_FAILED)


def _steps(
    concurrency: str | None, streams: int | None, connections: int | None, *, multiplexes: bool
) -> Sequence[Step]:
    if not multiplexes:
        if streams is not None or connections is not None:
            raise BenchmarkRefused(
                "--streams, --connections: not available over REST, where every request in flight"
                " has its own connection"
            )
        return [Step(count, 1) for count in _counts(concurrency)]
    if streams is not None and connections is not None:
        if concurrency is not None:
            raise BenchmarkRefused(
                "--concurrency: leave it out: --connections times --streams is the number of"
                " requests in flight"
            )
        return [_checked(Step(connections, streams))]
    return [_spread(count, streams, connections) for count in _counts(concurrency)]


def _spread(count: int, streams: int | None, connections: int | None) -> Step:
    if connections is None:
        connections = -(-count // (streams or count))
    if count % connections:
        raise BenchmarkRefused(
            f"--concurrency {count} cannot be spread evenly over {connections} connections"
        )
    return Step(connections, count // connections)


def _counts(text: str | None) -> Sequence[int]:
    text = text or _DEFAULT_CONCURRENCY
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise BenchmarkRefused(f"--concurrency: expected numbers like 1,4,16, got '{text}'")
    return [_checked(Step(count, 1)).concurrency for count in counts]


def _checked(step: Step) -> Step:
    if step.concurrency > _MAX_CONCURRENCY:
        raise BenchmarkRefused(
            f"expected at most {_MAX_CONCURRENCY} requests in flight, got {step.concurrency}"
        )
    return step


def _seconds(flag: str, text: str) -> float:
    found = _DURATION.fullmatch(text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else -1.0
    if not 0 <= seconds <= _MAX_SECONDS or (flag == "--duration" and not seconds):
        raise BenchmarkRefused(
            f"{flag}: expected a duration such as 500ms or 5s, at most 10m, got '{text}'"
        )
    return seconds


def _shapes(texts: Sequence[str] | None) -> Mapping[str, Shape]:
    found: dict[str, Shape] = {}
    for text in texts or ():
        # Names may contain an equals sign, sizes do not.
        name, separator, sizes = text.rpartition("=")
        if not separator or not re.fullmatch(r"\d+(,\d+)*", sizes):
            raise BenchmarkRefused(f"--shape: expected NAME=1,16, got '{text}'")
        found[name] = tuple(map(int, sizes.split(",")))
    return found
