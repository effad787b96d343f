"""Counts and durations: the sums themselves, and what the engine adds to them."""

import asyncio
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core import FP32, AddModel, Core, MakeCore, World
from support.executions import Ran, succeed

from xlaserve import errors
from xlaserve.errors import InvalidTensor, ModelNotFound, Overloaded
from xlaserve.serving.answers import Counting
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.stations.table import ExecutionPolicy, Stations
from xlaserve.serving.statistics import (
    EXACT_ROWS,
    REQUEST_BOUNDS_NS,
    FailureReason,
    StatisticDuration,
    Totals,
    VersionStatistics,
    reason_of,
)

MAX_NS = 10**12
REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 65_536),
        st.integers(0, MAX_NS),
        st.integers(0, MAX_NS),
        st.integers(0, MAX_NS),
        st.integers(0, MAX_NS),
    )
)


@given(REQUESTS)
def test_every_sum_is_that_of_the_requests(requests: list[tuple[int, int, int, int, int]]) -> None:
    """The histogram and the batch sizes count each request once, and the phases add up."""
    statistics = VersionStatistics()
    for rows, before, queue, infer, after in requests:
        begun = before + queue
        ended = begun + infer
        succeed(statistics, rows, (0, before, begun, ended, ended + after))
    totals = statistics.totals()
    count = len(requests)
    parts = (totals.compute_input, totals.queue, totals.compute_infer, totals.compute_output)

    assert count == totals.success.count == totals.execution_count
    assert [
        StatisticDuration(count, sum(r[part] for r in requests)) for part in (1, 2, 3, 4)
    ] == list(parts)
    assert totals.success.ns == sum(part.ns for part in parts)
    assert count == sum(totals.request_buckets)
    assert sum(r[0] for r in requests) == totals.inference_count
    assert count == sum(batch.compute_infer.count for batch in totals.batches)
    assert totals.compute_output.ns == sum(batch.compute_output.ns for batch in totals.batches)


@given(st.integers(0, 2 * REQUEST_BOUNDS_NS[-1]))
def test_a_request_is_in_the_first_bucket_that_holds_it(total_ns: int) -> None:
    statistics = VersionStatistics()
    succeed(statistics, times=(0, 0, 0, 0, total_ns))
    expected = [bound for bound in REQUEST_BOUNDS_NS if bound < total_ns]

    assert len(expected) == statistics.totals().request_buckets.index(1)


@given(st.sets(st.integers(1, 65_536)))
def test_batch_sizes_are_exact_while_they_are_small(sizes: set[int]) -> None:
    statistics = VersionStatistics()
    for rows in sizes:
        succeed(statistics, rows)
    shown = [batch.batch_size for batch in statistics.totals().batches]

    assert sorted(rows for rows in sizes if rows <= EXACT_ROWS) == [
        size for size in shown if size <= EXACT_ROWS
    ]
    assert all(rows <= max(shown) < 2 * rows or rows < max(sizes) for rows in sizes)


@pytest.mark.parametrize("together", [False, True])
def test_batch_sizes_are_never_many(together: bool) -> None:
    """However many sizes clients send, the statistics stay small."""
    statistics = VersionStatistics()
    most = 1 << 14
    for rows in range(1, most + 1):
        if together:
            statistics.succeeded_together([Ran(rows)], rows, Ran(), 0, 0)
        else:
            succeed(statistics, rows)
    powers = [1 << bits for bits in range(7, 15)]

    assert [*range(1, EXACT_ROWS + 1), *powers] == [
        batch.batch_size for batch in statistics.totals().batches
    ]


def test_nothing_happened_yet() -> None:
    totals = VersionStatistics().totals()

    assert StatisticDuration() == totals.success == totals.fail == totals.compute_output
    assert (0, 0, 0, ()) == (
        totals.inference_count,
        totals.execution_count,
        totals.last_inference_ms,
        totals.batches,
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.Overloaded("m", 1, "max_requests_per_model"), FailureReason.REJECTED),
        (errors.ShuttingDown(), FailureReason.REJECTED),
        (errors.MissingInputs("m", 1, 0, ["x"]), FailureReason.INVALID),
        (errors.Unsupported("that"), FailureReason.INVALID),
        (asyncio.CancelledError(), FailureReason.CANCELLED),
        (errors.OutOfMemory("m", "full"), FailureReason.BACKEND),
        (ValueError(), FailureReason.BACKEND),
        (KeyboardInterrupt(), FailureReason.BACKEND),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_has_a_reason(error: BaseException, reason: FailureReason) -> None:
    statistics = VersionStatistics()
    statistics.failed(error, 7)
    totals = statistics.totals()

    assert reason is reason_of(error)
    assert StatisticDuration(1, 7) == totals.fail
    assert [reason] == [known for known, count in totals.failures.items() if count]


# # --- counts of the engine ---


def request(model: str = "m", rows: int = 1, version: str = "") -> InferRequest:
    data = np.zeros((rows, 2), np.float32)
    return InferRequest(model, version, inputs=(InferInput("x", FP32, data),))


def ticking(core: Core, *, inline_seconds: float) -> Engine:
    """Make an engine whose clock advances by 10 ns with every reading."""
    ticks: Iterator[int] = itertools.count(1000, 10)
    clock = ticks.__next__
    gates = Gates(observers=[Counting(clock, lambda: 1_700_000_000_123_456_789)])
    engine = Engine(core.registry, gates, core.workers.host, clock=clock)
    stations = Stations(core.workers, ExecutionPolicy(inline_seconds), engine, clock)
    core.renew(stations)
    return engine


def totals(core: Core, model: str = "m", version: str = "1") -> Totals:
    return core.registry.version(model, version).statistics.totals()


async def test_an_inline_execution_waits_for_no_thread(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    await ticking(core, inline_seconds=10).infer(request(rows=3))
    found = totals(core)

    assert StatisticDuration(1, 30) == found.success
    assert [10, 0, 10, 10] == [
        part.ns
        for part in (found.compute_input, found.queue, found.compute_infer, found.compute_output)
    ]
    assert (3, 1, 1_700_000_000_123) == (
        found.inference_count,
        found.execution_count,
        found.last_inference_ms,
    )
    assert [3] == [batch.batch_size for batch in found.batches]


async def test_an_execution_in_a_thread_has_a_queue(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    await ticking(core, inline_seconds=0).infer(request())
    found = totals(core)

    assert StatisticDuration(1, 40) == found.success
    assert [10, 10, 10, 10] == [
        part.ns
        for part in (found.compute_input, found.queue, found.compute_infer, found.compute_output)
    ]


async def test_a_request_that_does_not_fit_the_model_is_a_failure(
    core: Core, add_model: AddModel
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    with pytest.raises(InvalidTensor):
        await ticking(core, inline_seconds=0).infer(request(rows=9))
    found = totals(core)

    assert (StatisticDuration(), StatisticDuration(1, 10)) == (found.success, found.fail)
    assert 1 == found.failures[FailureReason.INVALID]


async def test_what_a_transport_cannot_read_is_a_failure_too(
    core: Core, add_model: AddModel
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    with pytest.raises(InvalidTensor):
        with core.engine.require("m"):
            raise InvalidTensor("m", "input", "x", "8 bytes", "7")
    with core.engine.require("m"):
        pass

    assert StatisticDuration(1, 0) == totals(core).fail


async def test_unknown_models_and_versions_leave_no_trace(core: Core, add_model: AddModel) -> None:
    """Otherwise a client could make the statistics grow."""
    add_model("m", {1: 1})
    await core.control.load("m")
    for unknown in (request("nope"), request("m", version="9"), request("nope", version="1")):
        with pytest.raises(ModelNotFound):
            await core.engine.infer(unknown)

    assert ["m"] == [model.name for model in core.registry.models()]
    assert StatisticDuration() == totals(core).fail


async def test_a_request_over_the_limit_is_rejected(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(max_requests_per_model=1)
    add_model("m", {1: 1})
    await core.control.load("m")
    world.may_execute.clear()
    running = asyncio.create_task(core.engine.infer(request()))
    while not core.registry.requests:
        await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await core.engine.infer(request())
    world.may_execute.set()
    await running

    assert 1 == totals(core).failures[FailureReason.REJECTED]
    assert 1 == totals(core).success.count


async def test_a_cancelled_request_is_counted_and_what_waits_is_pending(
    core: Core, add_model: AddModel, world: World
) -> None:
    """Two threads execute; the third request waits until its client disconnects."""
    add_model("m", {1: 1})
    await core.control.load("m")
    instance = core.registry.resolve("m")[1]
    world.may_execute.clear()
    running = [asyncio.create_task(core.engine.infer(request())) for _ in range(3)]
    while instance.users < 6 or instance.pending > 1:
        await asyncio.sleep(0)
    pending = instance.pending
    running[2].cancel()
    await asyncio.wait([running[2]])
    left = instance.pending
    world.may_execute.set()
    await asyncio.gather(*running[:2])

    assert [1, 0] == [pending, left]
    assert 1 == totals(core).failures[FailureReason.CANCELLED]
    assert 2 == totals(core).success.count


async def test_a_model_that_breaks_is_a_failure_of_the_backend(
    core: Core, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*args: object, **more: object) -> None:
        raise RuntimeError("broken")

    add_model("m", {1: 1})
    await core.control.load("m")
    monkeypatch.setattr(world.open[0], "execute", break_down)
    with pytest.raises(RuntimeError):
        await core.engine.infer(request())

    assert 1 == totals(core).failures[FailureReason.BACKEND]


# --- ensembles ---

TENSOR = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}
ENSEMBLE = {
    "max_batch_size": 4,
    "input": [TENSOR],
    "output": [TENSOR | {"name": "y"}],
    "ensemble_scheduling": {
        "step": [
            {"model_name": "a", "input_map": {"x": "x"}, "output_map": {"y": "middle"}},
            {"model_name": "b", "input_map": {"x": "middle"}, "output_map": {"y": "y"}},
        ]
    },
}


async def add_ensemble(core: Core, add_model: AddModel) -> None:
    add_model("a", {1: 1})
    add_model("b", {1: 10})
    add_model("e", {}, ENSEMBLE)
    await core.control.load("e")


async def test_an_ensemble_counts_for_itself_and_for_its_steps(
    core: Core, add_model: AddModel
) -> None:
    """Queue and compute times of its steps count as compute time of the ensemble."""
    await add_ensemble(core, add_model)
    await ticking(core, inline_seconds=0).infer(request("e", rows=2))
    first, second, whole = (totals(core, name) for name in "abe")

    assert [1, 1, 1] == [each.success.count for each in (first, second, whole)]
    assert [2, 2, 2] == [each.inference_count for each in (first, second, whole)]
    assert StatisticDuration(1, 10) == first.compute_infer == second.compute_infer
    assert (StatisticDuration(1, 20), StatisticDuration(1, 20)) == (
        whole.queue,
        whole.compute_infer,
    )
    assert first.success.ns + second.success.ns < whole.success.ns


async def test_a_step_that_fails_fails_its_ensemble(
    core: Core, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*args: object, **more: object) -> None:
        raise RuntimeError("broken")

    await add_ensemble(core, add_model)
    second = next(model for model in world.open if model.amount == 10)
    monkeypatch.setattr(second, "execute", break_down)
    with pytest.raises(RuntimeError):
        await core.engine.infer(request("e"))

    assert [0, 1, 1] == [totals(core, name).fail.count for name in "abe"]
    assert [1, 0, 0] == [totals(core, name).success.count for name in "abe"]


# --- loads ---


async def test_loads_failures_and_unloads_are_counted(core: Core, add_model: AddModel) -> None:
    """A failed reload counts as a failure; statistics survive reloads and unloads."""
    add_model("m", {1: 1})
    await core.control.load("m")
    await core.engine.infer(request())
    (add_model("m", {1: 1}) / "1" / "amount.json").write_text("broken")
    with pytest.raises(errors.LoadFailed):
        await core.control.load("m")
    add_model("m", {1: 2})
    await core.control.load("m")
    await core.control.unload("m")
    statistics = core.registry.version("m", "1").statistics

    assert (2, 1, 1) == (statistics.loads, statistics.load_failures, statistics.unloads)
    assert 0 < statistics.load_seconds
    assert 1 == statistics.totals().success.count


async def test_statistics_die_with_what_the_registry_forgets(
    core: Core, add_model: AddModel
) -> None:
    directory = add_model("m", {1: 1})
    await core.control.load("m")
    (directory / "1" / "amount.json").unlink()
    (directory / "1").rmdir()
    directory.rmdir()
    await core.control.unload("m")

    assert [] == core.registry.models()
