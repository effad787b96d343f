"""The rows of docs/measurements/performance.md: workloads, peers and targets."""

from dataclasses import dataclass

from comparison.analyzer import Asked
from comparison.paced import LARGE, Paced
from comparison.python_models import ADD_SUB, REPEAT

BEST = "best peer"
"""Placeholder for the best peer in a row."""

ECHO = "raw echo"
"""Baseline: the same bytes through a bare socket."""

MESSAGE = "message"
"""Placeholder for the size of the message itself."""

EQUAL = "equal headers"
"""Placeholder for xlaserve itself with equal headers in every request."""

ONE_PROCESS = "one process"
"""Placeholder for xlaserve itself as a single process on the same cores."""

MILLISECOND = "a millisecond"
"""Placeholder for a constant of one millisecond."""

RATE, P50, P99, SECONDS, MEMORY = "rps", "p50", "p99", "seconds", "peak_bytes"
CPU = "cpu_us"
"""Names of the measures in a contender's numbers."""

HIGHER_IS_BETTER = frozenset({RATE})
BIG = "big"


@dataclass(frozen=True, slots=True)
class Target:
    """The intended ratio of xlaserve to another contender in one measure."""

    against: str
    """A peer, BEST, ECHO, MESSAGE, EQUAL, ONE_PROCESS, MILLISECOND, or the row's other load."""
    measure: str
    factor: float
    """Target ratio to the other contender: a minimum where higher is better, else a maximum."""

    def ratio(self, ours: float, theirs: float) -> float:
        """Return the ratio to compare with the factor; inverted for times compared as speeds."""
        return theirs / ours if self.is_speed else ours / theirs

    @property
    def is_speed(self) -> bool:
        """Tell whether the target asks for a speed, although the measure is a time."""
        return self.measure == SECONDS and self.factor > 1 and self.against != ECHO

    @property
    def at_least(self) -> bool:
        """Tell whether the factor is a minimum."""
        return self.measure in HIGHER_IS_BETTER or self.is_speed

    def is_met(self, ratio: float) -> bool:
        """Tell whether the ratio meets the target."""
        return ratio >= self.factor if self.at_least else ratio <= self.factor


@dataclass(frozen=True, slots=True)
class Row:
    """One workload at one load."""

    name: str
    title: str
    protocol: str
    """Protocol by the kit's name: grpc, json or bin."""
    workload: str
    """Workload by the kit's name."""
    load: str
    """Connections x streams; over REST, as many connections as their product."""
    peers: tuple[str, ...]
    targets: tuple[Target, ...]
    varies: bool = False
    """Whether headers differ between requests. Each contender is then also measured with equal
    headers, and by another client than the kit's.
    """
    is_python: bool = False
    """Whether the servers serve the same Python models and nothing else."""
    analyzed: Asked | None = None
    """The workload of perf_analyzer, if that is the client."""
    paced: Paced | None = None
    """The fixed rate of the requests, if they do not wait for answers."""
    other_load: str = ""
    """A second load at which each contender is measured, for comparison."""
    workers: int = 1
    """Number of xlaserve workers. With more than one, they and the client share all cores, and a
    single process is measured there as well.
    """

    @property
    def in_flight(self) -> int:
        """Return how many requests are in flight."""
        connections, streams = map(int, self.load.split("x"))
        return connections * streams


def with_equal_headers(name: str) -> str:
    """Return the name of a contender when its requests have equal headers."""
    return f"{name}, {EQUAL}"


def with_one_process(name: str) -> str:
    """Return the name of a contender that runs as one process instead of several workers."""
    return f"{name}, {ONE_PROCESS}"


def with_load(name: str, load: str) -> str:
    """Return the name of a contender at another load than the row's own."""
    return f"{name}, {load.replace('x', ' x ')}"


def _rate(against: str, factor: float) -> Target:
    return Target(against, RATE, factor)


def _beside(large: str) -> Row:
    """Return a row of small requests with a large one in flight."""
    what = LARGE[large].title if large else "nothing else"
    return Row(
        f"beside-{large or 'nothing'}",
        f"identity FP32[1,16] over gRPC, {_SMALL_RATE} a second, beside {what}",
        "grpc",
        "identity",
        "1x100",
        ("triton",),
        (Target("triton", P99, 1),) if large else (),
        paced=Paced(_SMALL_RATE, large),
    )


def _workers(name: str, title: str, workload: str) -> Row:
    """Return a row that compares two workers with one process on the same two cores."""
    return Row(
        f"workers-{name}",
        f"{title} over gRPC, 4 connections x 16 streams; --processes 2, the client on the same "
        "two cores",
        "grpc",
        workload,
        "4x16",
        (),
        (_rate(ONE_PROCESS, 1.35),),
        workers=2,
    )


def _analyzed(name: str, title: str, protocol: str, asked: Asked) -> Row:
    """Return a row that measures a Python model with perf_analyzer.

    perf_analyzer is one process on one core and may saturate before the server does, so one target
    is in CPU time.
    """
    return Row(
        name,
        f"perf_analyzer, {title}, {_ANALYZED} in flight",
        protocol,
        asked.model,
        f"1x{_ANALYZED}",
        ("triton",),
        (_rate("triton", 3), Target("triton", CPU, 0.33)),
        is_python=True,
        analyzed=asked,
    )


_SMALL_RATE = 300
_ANALYZED = 64
_SHARED = ("--shared-memory", "system")

ROWS = (
    Row(
        BIG,
        "64 MiB FP32 there and back over gRPC, one at a time",
        "grpc",
        BIG,
        "1x1",
        ("floor", "triton"),
        (
            Target("floor", SECONDS, 4),
            Target(ECHO, SECONDS, 2.2),
            Target(MESSAGE, MEMORY, 2.3),
        ),
    ),
    Row(
        "identity",
        "identity FP32[1,16] over gRPC, 4 connections x 16 streams",
        "grpc",
        "identity",
        "4x16",
        ("floor", "triton", "mlserver", "kserve"),
        (_rate("floor", 12), _rate("triton", 8), _rate("mlserver", 15), _rate("kserve", 15)),
    ),
    Row(
        "single",
        "identity FP32[1,16] over gRPC, one request at a time",
        "grpc",
        "identity",
        "1x1",
        ("floor", "triton"),
        (Target("floor", P50, 0.5), Target("floor", P99, 0.5)),
    ),
    Row(
        "image",
        "mean of each channel of FP32[1,3,224,224] over gRPC, 1 connection x 8 streams",
        "grpc",
        "image",
        "1x8",
        ("floor", "triton"),
        (_rate("floor", 2.5), _rate("triton", 2)),
    ),
    Row(
        "mlp",
        "perceptron 784-512-10, FP32[1,784] over gRPC, 4 connections x 16 streams, batched",
        "grpc",
        "mlp1",
        "4x16",
        ("floor", "triton", "mlserver", "kserve"),
        (_rate(BEST, 5),),
    ),
    Row(
        "json",
        "identity FP32[1,16] over REST as JSON, 64 connections",
        "json",
        "identity",
        "4x16",
        ("triton", "mlserver", "kserve"),
        (_rate(BEST, 2),),
    ),
    Row(
        "binary",
        "identity FP32[1,16] over REST in the binary form, 64 connections",
        "bin",
        "identity",
        "4x16",
        ("triton", "kserve"),
        (_rate(BEST, 2),),
    ),
    Row(
        "headers",
        "identity FP32[1,16] over gRPC, 4 connections x 16 streams; deadline, trace, id and token "
        "of each request's own",
        "grpc",
        "identity",
        "4x16",
        ("floor", "triton", "mlserver", "kserve"),
        (Target(EQUAL, CPU, 1.25),),
        varies=True,
    ),
    Row(
        "headers-rest",
        "identity FP32[1,16] over REST as JSON, 64 connections; trace, id and token of each "
        "request's own",
        "json",
        "identity",
        "4x16",
        ("triton", "mlserver", "kserve"),
        (Target(EQUAL, CPU, 1.25),),
        varies=True,
    ),
    Row(
        "thousand",
        "identity FP32[1,16] over gRPC, 1,000 connections x 1 stream",
        "grpc",
        "identity",
        "1000x1",
        ("triton",),
        (_rate("4x16", 0.5),),
        other_load="4x16",
    ),
    Row(
        "open",
        "identity FP32[1,16] over gRPC, 20,000 a second on 4 connections, whatever is answered",
        "grpc",
        "identity",
        "4x1000",
        (),
        (Target(MILLISECOND, P50, 0.5),),
        paced=Paced(20_000),
    ),
    *map(_beside, ("", *LARGE)),
    Row(
        "json-200k",
        "perceptron, FP32[32,784] over REST as JSON of 220 KB, 4 connections",
        "json",
        "mlp32",
        "4x1",
        ("triton", "mlserver", "kserve"),
        (_rate(BEST, 1.5),),
    ),
    Row(
        "json-1m",
        "mean of each channel of FP32[1,3,224,224] over REST as JSON of 1.3 MB, 4 connections",
        "json",
        "image",
        "4x1",
        ("triton", "mlserver", "kserve"),
        (_rate(BEST, 1.5),),
    ),
    _workers("identity", "identity FP32[1,16]", "identity"),
    _workers("mlp", "perceptron 784-512-10, FP32[32,784]", "mlp32"),
    # Last, because Triton is known to crash in it.
    Row(
        "cached",
        "identity FP32[1,16] over gRPC, 1 connection x 8 streams; answered from the response cache",
        "grpc",
        "cached",
        "1x8",
        ("triton",),
        (_rate("triton", 1),),
    ),
    Row(
        "python",
        "add_sub FP32[4] as a TritonPythonModel over gRPC, 4 connections x 16 streams",
        "grpc",
        ADD_SUB,
        "4x16",
        ("triton",),
        (_rate("triton", 3),),
        is_python=True,
    ),
    _analyzed("analyzer", "add_sub over gRPC", "grpc", Asked(ADD_SUB, ())),
    _analyzed(
        "analyzer-stream",
        "add_sub over gRPC, --streaming",
        "grpc",
        Asked(ADD_SUB, ("--streaming",)),
    ),
    _analyzed(
        "analyzer-shared",
        "add_sub over gRPC, --shared-memory system",
        "grpc",
        Asked(ADD_SUB, _SHARED),
    ),
    _analyzed("analyzer-http", "add_sub over HTTP", "http", Asked(ADD_SUB, ())),
    _analyzed(
        "analyzer-http-shared",
        "add_sub over HTTP, --shared-memory system",
        "http",
        Asked(ADD_SUB, _SHARED),
    ),
    _analyzed(
        "analyzer-repeat",
        "decoupled repeat with 8 answers each, --streaming, answers counted",
        "grpc",
        Asked(REPEAT, ("--streaming", "--shape", "IN:8"), answers=8),
    ),
)
