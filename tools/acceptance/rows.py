"""The acceptance table: each row with its action, criterion, environment and check."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from acceptance import (
    cancelling,
    chaos,
    children,
    conformance,
    everything,
    floods,
    fuzz,
    holding,
    loads,
    pictures,
    requests,
    row_programs,
    stopping,
    suites,
)
from acceptance.figures import Outcome

SOAK, FLOOD, FUZZ, CHAOS, TESTS = "soak", "flood", "fuzz", "chaos", "tests"
ENVIRONMENTS = (SOAK, FLOOD, FUZZ, CHAOS)
"""The tox environments that print figures; rows of `tests` are covered by the test suite alone."""


class Size(StrEnum):
    """Sizes of a run."""

    SHORT = "short"
    """A few seconds per row, as in the test suite."""
    WHOLE = "whole"
    """The numbers in the criterion."""
    LONG = "long"
    """More than the criterion asks for, on demand."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    id: str
    environment: str
    what: str
    criterion: str
    check: Callable[..., Outcome] | None = None
    """Takes a directory, and sizes as keyword arguments."""
    sizes: Mapping[Size, Mapping[str, Any]] = field(default_factory=dict)
    """Keyword arguments of each size; omitted ones have the check's defaults."""
    tests: tuple[str, ...] = ()
    """Tests that cover the row or parts of it: files, or `file::name`."""
    takes: tuple[str, ...] = ()
    """Keyword arguments that the command line may set: `seconds`, `without`, `programs`..."""

    def run(self, folder: Path, size: Size = Size.WHOLE, **said: Any) -> Outcome:
        """Run the check; blocks. Options in `takes` override those of the size."""
        assert self.check is not None
        own = {name: value for name, value in said.items() if value and name in self.takes}
        return self.check(folder, **{**self.sizes.get(size, {}), **own})


ROWS = (
    Row(
        "L1",
        SOAK,
        "32 clients load and unload one model 1 024 times each",
        "only texts of a list; live and ready behind it",
        loads.races,
        {Size.SHORT: {"clients": 8, "rounds": 8}},
        ("tests/interop/test_stress.py",),
    ),
    Row(
        "L2",
        SOAK,
        "1 000 reloads of two versions in turns, 16 clients",
        "0 failed of 100 000 requests; each answer of one version; memory < 2 %",
        loads.reloads,
        {Size.SHORT: {"count": 30, "requests": 1000}},
    ),
    Row(
        "L3",
        SOAK,
        "2 000 loads and unloads",
        "memory < 1 KiB a cycle, files and threads + 0",
        loads.cycles,
        # Too few cycles to resolve a kilobyte per cycle.
        {Size.SHORT: {"count": 100, "most_kib": 40}},
        ("tests/interop/test_stress.py::test_memory_comes_back_after_each_unload",),
    ),
    Row(
        "M1",
        SOAK,
        "100 000 requests of all kinds over 8 connections (1 million with --long)",
        "0 wrong, 0 lost, memory < 1 % or 10 MiB in the second half",
        requests.mixed,
        {Size.SHORT: {"count": 2000}, Size.LONG: {"count": 1_000_000}},
    ),
    Row(
        "M3",
        SOAK,
        "1 000 answers of 10 MiB are aborted",
        "memory within 64 MiB of the start in 5 s",
        requests.aborted,
        {Size.SHORT: {"count": 100}},
        ("tests/contract/test_memory_budget.py::test_answers_that_are_taken_back",),
    ),
    Row(
        "M4",
        SOAK,
        f"1 h of {len(everything.KINDS)} kinds of clients at once, any of which can be left out",
        "0 wrong, 0 lost; counters as the clients counted; memory of the server's own process "
        "< 1 % or 10 MiB in the second half, besides the 16 MiB that it keeps before it trims; no "
        "trial load left; models book what they have; files + 3, threads + 2, ledger back",
        everything.everything,
        # The server is still warming up in so short a run.
        {Size.SHORT: {"seconds": 30, "most_mib": 400}},
        takes=("seconds", "without"),
    ),
    Row(
        "F1",
        FUZZ,
        "1 million mutated protobuf messages, beside google's decoder and the generic codec",
        "0 differences; what is too much to read is refused; none of a mebibyte takes 50 ms",
        holding.protobuf,
        {
            Size.SHORT: {"tests": 20_000, "note": "20 000 messages", "messages": 20_000},
            Size.WHOLE: {"tests": 1_000_000, "note": "1 000 000 messages"},
            Size.LONG: {"tests": 10_000_000, "note": "10 000 000 messages"},
        },
    ),
    Row(
        "F3",
        FUZZ,
        "200 000 damaged requests over HTTP, to every kind of address, and 20 000 of boofuzz",
        "0 answers of 5xx but 501, 503, 505, 507; none takes 2 s",
        fuzz.http,
        {
            Size.SHORT: {"count": 2000, "boofuzzed": 400},
            Size.LONG: {"count": 2_000_000, "boofuzzed": 80_000},
        },
        ("tests/interop/test_schemathesis.py", "tests/contract/test_http_faults.py"),
    ),
    Row(
        "F4",
        FUZZ,
        "100 000 mutated conversations of HTTP/2 with a running server",
        "it lives, 0 errors of a victim, each connection ends in 5 s",
        fuzz.http2,
        {Size.SHORT: {"count": 500}, Size.LONG: {"count": 1_000_000}},
        ("tests/transport/http2/test_differential.py", "tests/transport/http2/test_h2spec.py"),
    ),
    Row(
        "H1",
        FLOOD,
        "26 floods, beside each a client in a process of its own",
        "its worst call < 100 ms, 0 errors; memory < 64 MiB, behind it < 16; GOAWAY; CPU < 1 s",
        floods.flood,
        {Size.SHORT: {"timed": False, "names": ("PING", "requests that are cancelled at once")}},
        ("tests/transport/http2/test_floods.py",),
    ),
    Row(
        "H2",
        FLOOD,
        "4 GiB are announced, 65 MiB sent, 1 GiB in gzip",
        "RESOURCE_EXHAUSTED; memory < 1 MiB, of gzip bounded by the largest message",
        floods.oversized,
        {},
        ("tests/contract/test_memory_budget.py::test_bombs",),
    ),
    Row(
        "H3",
        FLOOD,
        "2 000 connections that say nothing",
        "dropped in 5 s, 16 KiB each; a new client is served in 100 ms",
        floods.silent,
        {},
        ("tests/transport/http2/test_floods.py::test_clients_that_say_nothing_are_dropped",),
    ),
    Row(
        "H4",
        FLOOD,
        "bodies of 65 537 chunks, and 100 of 1 million",
        "400 or 413; memory < 1 MiB",
        floods.chunks,
        {Size.SHORT: {"times": 2}},
        (
            "tests/transport/rest/test_server.py"
            "::test_65536_chunks_are_read_and_one_more_is_refused",
        ),
    ),
    Row(
        "H5",
        FLOOD,
        "the probes of HTTP/2 and gRPC, one by one",
        "all of them",
        partial(suites.run_tests, tests=("tests/transport/http2/test_probes.py",)),
    ),
    Row(
        "M2",
        CHAOS,
        "1 h of loads, reloads, cancels, clients that vanish, slow readers, floods, a full disk, "
        "and a SIGKILL a minute",
        "0 wrong, 0 lost but in flight at a SIGKILL; p99 < 3 times that of a server without chaos; "
        "all has ended",
        chaos.chaos,
        {Size.SHORT: {"seconds": 30, "kill_every": 12, "timed": False}},
        takes=("seconds",),
    ),
    Row(
        "D2",
        CHAOS,
        "100 SIGKILLs at random in loads, overrides and unloads",
        "repository unchanged, nothing left behind, index right",
        chaos.kills,
        {Size.SHORT: {"count": 4}},
        ("tests/cli/test_leftovers.py", "tests/contract/test_model_runtime_soak.py"),
    ),
    Row(
        "D4",
        FUZZ,
        "each file of a model cut at 64 points, 1 000 bits flipped in each",
        "an error of the load, nothing else",
        partial(suites.run_tests, tests=("tests/models/test_corruption.py",)),
        {Size.WHOLE: {"corruption_cuts": 64, "corruption_flips": 1000, "note": "64 and 1 000"}},
    ),
    Row(
        "D7",
        CHAOS,
        "requests are cancelled at each of six points, 1 000 times each",
        "0 slots are taken behind it",
        cancelling.cancel,
        {Size.SHORT: {"count": 100}},
        ("tests/contract/test_deadlines.py", "tests/core/serving/test_call.py"),
    ),
    Row(
        "D8",
        CHAOS,
        "SIGSTOP of each process that serves, 20 times, every other time under a watchdog",
        "not ready within 3 s; 0 failed requests to other processes; replaced within 15 s",
        stopping.stop_each,
        {Size.SHORT: {"count": 2, "kinds": "worker", "timed": False}},
        ("tests/processes/test_silence.py",),
    ),
    Row(
        "D9",
        CHAOS,
        "SIGSTOP and SIGKILL of each kind of child in the middle of its work, 20 times, every "
        "other time under a watchdog; a stop of the server beside stopped children",
        "0 failed requests to others; another child within 15 s does the work; nothing is left, "
        "nor on the ledger; the server ends within its grace and 5 s",
        children.end_each,
        {Size.SHORT: {"count": 1, "kinds": ("Python model", "template"), "timed": False}},
        ("tests/acceptance/test_children.py", "tests/contract/test_stopped_processes.py"),
        takes=("kinds",),
    ),
    Row(
        "F2",
        FUZZ,
        "the conformance runner of protobuf",
        "0 required failures in binary on the types that are used",
        conformance.conform,
        tests=("tests/transport/grpc/test_codec_differential.py",),
    ),
    Row(
        "R1",
        FUZZ,
        "5 000 random programs that move the elements of a batch",
        "0 outputs are proved and depend on more than their row; at most 10 % of the independent "
        "ones are refused",
        partial(row_programs.judge, family="moves", first=100_000),
        {Size.SHORT: {"programs": 8, "most_percent": 100.0}, Size.LONG: {"programs": 50_000}},
        ("tests/models/rows/test_moves.py",),
        takes=("programs", "first", "processes", "results"),
    ),
    Row(
        "R2",
        FUZZ,
        "5 000 random programs of what jax.numpy and jax.lax have",
        "0 outputs are proved and depend on more than their row; at most 10 % of the independent "
        "ones are refused",
        partial(row_programs.judge, family="broad", first=200_000),
        {Size.SHORT: {"programs": 8, "most_percent": 100.0}, Size.LONG: {"programs": 50_000}},
        ("tests/models/rows/test_programs.py",),
        takes=("programs", "first", "processes", "results"),
    ),
    Row(
        "D1",
        TESTS,
        "SIGTERM under load",
        "OK, or a clean UNAVAILABLE behind GOAWAY; 0 cut; exit 0 within the grace",
        tests=("tests/contract/test_drain.py",),
    ),
    Row(
        "D3",
        TESTS,
        "a disk that is full, or read-only, under an override",
        "RESOURCE_EXHAUSTED, nothing left behind, the old version serves",
        tests=("tests/acceptance/test_disk.py",),
    ),
    Row(
        "D5",
        TESTS,
        "no memory on load and on infer",
        "507 and RESOURCE_EXHAUSTED, the next request OK, reservations exact",
        tests=(
            "tests/contract/test_sagemaker.py",
            "tests/contract/test_http_faults.py::test_a_device_without_memory_is_507",
            "tests/core/residence/test_capacity.py",
        ),
    ),
    Row(
        "D6",
        TESTS,
        "a device that fails, an execution that hangs",
        "INTERNAL, the model unready, the server live, found in 10 s",
        tests=(
            "tests/contract/test_hung_executions.py",
            "tests/core/serving/stations/test_health.py",
        ),
    ),
    Row(
        "S1",
        TESTS,
        "more than 200 names that lead out, links, FIFOs and devices",
        "all refused as INVALID_ARGUMENT, nothing opened outside of the roots",
        tests=(
            "tests/contract/test_model_repository.py::test_no_name_leads_out_of_its_directory",
            "tests/contract/test_opened_outside.py",
            "tests/core/residence/test_names.py",
            "tests/models/test_roots.py",
        ),
    ),
    Row(
        "S2",
        FUZZ,
        "images that become huge, truncated ones, bad base64",
        "refused, below 64 MiB, in 1 s",
        pictures.huge,
        {Size.SHORT: {}},
        tests=("tests/core/serving/test_image_files.py",),
    ),
    Row(
        "S3",
        TESTS,
        "no unpickling, no eval, no import of what data names; a canary in every file",
        "the canary never runs",
        tests=("tests/models/test_no_code_in_data.py",),
    ),
    Row(
        "S4",
        TESTS,
        "every operation, protocol and caller",
        "0 ways around",
        tests=("tests/contract/test_access.py",),
    ),
    Row(
        "S5",
        TESTS,
        "names that forge records, long ones, tracebacks without end",
        "0 forged records, 8 KB a record, 100 tracebacks a minute",
        tests=("tests/test_log.py",),
    ),
    Row(
        "S6",
        TESTS,
        "the process: sockets, user, root file system",
        "0660 unless set, removed at exit, uid not 0, read-only root",
        tests=("tests/deploy", "tests/transport/test_endpoints.py"),
    ),
)
