"""Compare xlaserve with other model servers in one run, and write docs/measurements/performance.md.

    python tools/compare.py [--rows identity,image] [--peers floor,triton] [--resume] [--write]

Needs the bench kit with its peers set up, h2load, curl, and two cores that are otherwise idle: one
for the servers, one for the client. All servers of a row are measured alternately, at least three
times each, and repetitions disturbed by other processes are repeated. Each row is saved when it is
done: --resume continues an interrupted run, --report measures nothing.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from comparison import beside, big_message, page, processes, python_models
from comparison.analyzer import Analyzer, Asked, Server
from comparison.big_message import Echo
from comparison.conditions import conditions
from comparison.contenders import (
    NO_POLLING,
    OURS,
    Contender,
    Contenders,
    Variant,
    default_variants,
    parse_variant,
    with_processes,
    with_python,
    without_polling,
)
from comparison.interleaving import Numbers, Rounds, interleave
from comparison.kit import PEERS, Kit, Repetition
from comparison.paced import Paced
from comparison.results import Results
from comparison.rows import (
    BIG,
    CPU,
    ECHO,
    MEMORY,
    ROWS,
    Row,
    with_equal_headers,
    with_load,
    with_one_process,
)
from comparison.varying import Load, drive, identity_load
from make_bench_models import MODELS, make

ROOT = Path(__file__).parents[1]
ROW_NAMES = tuple(row.name for row in ROWS)


class Comparison:
    """One run: the contenders, the kit that measures them, and the results file."""

    def __init__(self, arguments: argparse.Namespace, kit: Kit, contenders: Contenders) -> None:
        self._seconds: float = arguments.seconds
        self._rounds = Rounds(arguments.repetitions, arguments.most)
        self._kit, self._contenders = kit, contenders
        self._console = Console()

    def measure(
        self, row: Row, variants: list[Variant], peers: tuple[str, ...]
    ) -> dict[str, Numbers]:
        """Measure a row; return each contender's numbers."""
        over_http2 = row.protocol == "grpc"
        ours = [one.name for one in variants if over_http2 or one.name == OURS]
        names = ours + [peer for peer in row.peers if peer in peers]
        self._console.rule(row.title, align="left")
        started = time.monotonic()
        if row.name == BIG:
            found = self._big(names)
        elif row.paced is not None:
            found = self._paced(row, row.paced, names)
        elif row.workers > 1:
            found = self._workers(row, OURS)
        elif row.varies:
            found = self._varying(row, names)
        elif row.is_python:
            found = self._python(row, [name for name in names if name in (OURS, *row.peers)])
        else:
            found = self._load(row, names)
        self._console.print(f"{time.monotonic() - started:.0f} s")
        return found

    def _load(self, row: Row, names: list[str]) -> dict[str, Numbers]:
        running = self._contenders.running(names)
        measures = {one.name: partial(self._repetition, row, row.load, one) for one in running}
        if row.other_load:
            measures |= {
                with_load(one.name, row.other_load): partial(
                    self._repetition, row, row.other_load, one
                )
                for one in running
            }
        return interleave(measures, self._rounds, self._show)

    def _paced(self, row: Row, pace: Paced, names: list[str]) -> dict[str, Numbers]:
        def measure(contender: Contender) -> Repetition:
            self._contenders.running([contender.name])  # restart it if it has crashed
            return beside.measure(self._kit, contender, row.load, pace, 2 * self._seconds)

        names = [name for name in names if name in (OURS, *row.peers)]
        running = self._contenders.running(names)
        measures = {one.name: partial(measure, one) for one in running}
        return interleave(measures, self._rounds, self._show)

    def _repetition(self, row: Row, load: str, contender: Contender) -> Repetition:
        self._contenders.running([contender.name])  # restart it if it has crashed
        return self._kit.measure(
            contender.http_port if row.protocol != "grpc" else contender.grpc_port,
            contender.pid,
            protocol=row.protocol,
            workload=row.workload,
            load=load,
            seconds=self._seconds,
            everywhere=row.workers > 1,
        )

    def _big(self, names: list[str]) -> dict[str, Numbers]:
        running = self._contenders.running(names, fresh=True)
        idle = {one.name: processes.resident_bytes(one.pid) for one in running}
        for one in running:
            processes.reset_peak(one.pid)
        measures: dict[str, Callable[[], Repetition]] = {
            one.name: partial(big_message.measure, self._kit, one) for one in running
        }
        echo = Echo(self._kit)
        try:
            found = interleave(measures | {ECHO: echo.measure}, self._rounds, self._show)
        finally:
            echo.close()
        for one in running:
            found[one.name][MEMORY] = processes.peak_bytes(one.pid) - idle[one.name]
        return found

    def _workers(self, row: Row, name: str) -> dict[str, Numbers]:
        measures = {}
        for count, shown in ((1, with_one_process(name)), (row.workers, name)):
            (running,) = self._contenders.running([with_processes(name, count)])
            measures[shown] = partial(self._repetition, row, row.load, running)
        return interleave(measures, self._rounds, self._show)

    def _varying(self, row: Row, names: list[str]) -> dict[str, Numbers]:
        protocol = "grpc" if row.protocol == "grpc" else "rest"
        measures = {}
        for name in names:
            server = name if name in row.peers else without_polling(name)
            (running,) = self._contenders.running([server])
            port = running.grpc_port if protocol == "grpc" else running.http_port
            for vary, shown in ((False, with_equal_headers(name)), (True, name)):
                load = identity_load(protocol, port, row.load, vary=vary)
                measures[shown] = partial(self._drive, server, load)
        with self._kit.on_client_cpu():
            return interleave(measures, self._rounds, self._show)

    def _python(self, row: Row, names: list[str]) -> dict[str, Numbers]:
        measures: dict[str, Callable[[], Repetition]] = {}
        for name in names:
            (running,) = self._contenders.running([with_python(name)])
            measures[name] = (
                partial(self._repetition, row, row.load, running)
                if row.analyzed is None
                else partial(self._analyze, row, row.analyzed, running)
            )
        return interleave(measures, self._rounds, self._show)

    def _analyze(self, row: Row, asked: Asked, contender: Contender) -> Repetition:
        self._contenders.running([contender.name])  # restart it if it has crashed
        server = Server(contender.grpc_port, contender.http_port, contender.pid)
        return Analyzer(self._kit).measure(
            server, asked, row.protocol, row.in_flight, self._seconds
        )

    def _drive(self, server: str, load: Load) -> Repetition:
        (running,) = self._contenders.running([server])  # restart it if it has crashed
        return drive(load, running.pid, self._seconds)

    def _show(self, name: str, repetition: Repetition) -> None:
        wanted = ("error", "rps", "p50", "p99", "seconds", CPU, "other_cpu")
        shown = (f"{key} {repetition[key]}" for key in wanted if key in repetition)
        self._console.print(f"{name:18} {', '.join(shown)}", highlight=False, markup=False)


def main() -> None:
    """Read the arguments, measure what is missing, and report."""
    arguments = _arguments()
    # Exit normally on SIGTERM, so that the started servers are stopped as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    results_file: Path = arguments.work / "results.json"
    if arguments.report or arguments.resume:
        if arguments.report and not results_file.exists():
            sys.exit(f"{results_file}: nothing was measured yet")
        results = Results.read(results_file) if results_file.exists() else Results()
    else:
        results = Results()
    if not arguments.report:
        _measure(arguments, results, results_file)
    _report(results)
    if arguments.write:
        page.write(results, ROOT / "docs" / "measurements" / "performance.md")


def _measure(arguments: argparse.Namespace, results: Results, results_file: Path) -> None:
    kit = Kit(
        arguments.bench_kit.resolve(), arguments.cache, arguments.server_cpu, arguments.client_cpu
    )
    kit.check(arguments.peers)
    if any(row.analyzed for row in ROWS if row.name in arguments.rows):
        Analyzer(kit).check()
    models, logs = arguments.work / "models", arguments.work / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not all((models / name / "1").exists() for name in MODELS):
        make(models)
    variants = arguments.variant or default_variants()
    found = conditions(kit, arguments.peers)
    if results.rows and results.conditions | {"date": ""} != found | {"date": ""}:
        sys.exit("what is there was measured under other conditions: measure it without --resume")
    results.conditions = found
    results.message_bytes = kit.body("big").stat().st_size
    results.contenders = [*(one.name for one in variants), *arguments.peers]
    with Contenders(kit, models, logs) as contenders:
        _add_variants(contenders, variants)
        for peer in arguments.peers:
            contenders.add_peer(peer)
        if any(row.is_python for row in ROWS if row.name in arguments.rows):
            _add_python(contenders, kit, arguments)
        comparison = Comparison(arguments, kit, contenders)
        for row in ROWS:
            if row.name in arguments.rows and row.name not in results.rows:
                results.rows[row.name] = comparison.measure(row, variants, arguments.peers)
                results.write(results_file)


def _add_variants(contenders: Contenders, variants: list[Variant]) -> None:
    for variant in variants:
        contenders.add_variant(variant)
        patient = without_polling(variant.name)
        contenders.add_variant(Variant(patient, (*variant.flags, *NO_POLLING)))
        if variant.name == OURS:
            for count in {1, *(row.workers for row in ROWS)}:
                contenders.add_processes(variant, count)


def _add_python(contenders: Contenders, kit: Kit, arguments: argparse.Namespace) -> None:
    repository = arguments.work / "python-models"
    python_models.make(repository)
    python_models.write_body(kit.cache / "bodies")
    contenders.add_python(OURS, repository)
    if "triton" in arguments.peers:
        contenders.add_python("triton", repository)


def _report(results: Results) -> None:
    table = Table("measured", "against", "of", "wanted", "ratio", "")
    marks = {True: "met", False: "[red]NOT MET[/red]", None: "?"}
    found = page.all_verdicts(results)
    for one in found:
        ratio = "not measured" if one.ratio is None else f"{one.ratio:.2f}x"
        table.add_row(one.row.name, one.against, one.measure, one.wanted, ratio, marks[one.is_met])
    Console().print(table)
    below = sum(one.is_met is False for one in found)
    print(f"{sum(one.is_met is True for one in found)} of {len(found)} met, {below} not met")


def _arguments() -> argparse.Namespace:
    text, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=text, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--bench-kit", type=Path, default=ROOT.parent / "shared" / "bench")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("PEERS_CACHE", default_cache / "xlaserve-peers")),
        help="where the kit's setup put the peers (default: $PEERS_CACHE, as there)",
    )
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "comparison")
    parser.add_argument("--peers", type=_names(PEERS), default=PEERS, metavar="A,B")
    parser.add_argument(
        "--rows", type=_names(ROW_NAMES), default=ROW_NAMES, metavar="A,B", help=",".join(ROW_NAMES)
    )
    parser.add_argument(
        "--variant",
        type=parse_variant,
        action="append",
        metavar="NAME=FLAGS",
        help=f"how xlaserve is started, may be repeated; the targets are about '{OURS}'",
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of one repetition")
    parser.add_argument("--repetitions", type=int, default=3, help="clean ones that are wanted")
    parser.add_argument("--most", type=int, default=6, help="repetitions, clean or not")
    parser.add_argument("--server-cpu", default="0")
    parser.add_argument("--client-cpu", default="1")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are done")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what there is")
    parser.add_argument("--write", action="store_true", help="write the page of performance")
    return parser.parse_args()


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"'{unknown[0]}' is none of {', '.join(known)}")
        return names

    return read


if __name__ == "__main__":
    main()
