"""The station for sequences: which requests share a batch, and the state after a failure."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.core import FP32, AddModel, Core, FakeModel, MakeCore, World

from xlaserve.errors import (
    DeadlineExceeded,
    InvalidParameter,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ShuttingDown,
)
from xlaserve.errors.sequence import (
    MissingSequence,
    SequenceInterrupted,
    SequenceNotStarted,
    SequenceRows,
    StatesLost,
)
from xlaserve.model_config.sequence_batching import SequenceBatching
from xlaserve.runtime.loaded import InFlight, Value
from xlaserve.runtime.sequential import SequenceId, Step
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.tensors import Tensor

FAILS, LOSES = 1000.0, 2000.0


class Sums(FakeModel):
    """Adds up the inputs of each sequence, in the slot it is assigned."""

    batching = SequenceBatching(idle_microseconds=60_000_000, max_candidates=4)
    handling = None

    def __init__(self, amount: float, world: World, devices: Sequence[str]) -> None:
        super().__init__(amount, world, devices)
        self.info = type(self.info)(
            self.info.platform,
            self.info.inputs,
            self.info.outputs,
            max_batch_size=self.info.max_batch_size,
            has_sequences=True,
        )
        self.slots = self.batching.slots(self.info.max_batch_size)
        self.states = np.zeros((world.replicas, self.slots), np.float32)
        self.batches: list[list[SequenceId]] = []

    def controls(self, steps: Sequence[Step]) -> Mapping[str, Tensor]:
        return {}

    def check_id(self, sequence: SequenceId) -> None:
        if sequence == "wrong":
            raise InvalidParameter("sequence_id", "another", str(sequence))

    def step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> Mapping[str, Tensor]:
        self._world.may_execute.wait(10)
        assert not self.closed
        x: Any = inputs["x"]
        self.batches.append([step.id for step in steps if step.is_ready])
        assert len(x) == len(steps)
        if np.any(x == FAILS):
            raise ArithmeticError("it cannot be added")
        if np.any(x == LOSES):
            self.states[replica] = 0
            raise StatesLost("m")
        states = self.states[replica]
        for row, step in enumerate(steps):
            if step.is_ready:
                before = 0 if step.is_start else states[step.slot]
                states[step.slot] = before + x[row, 0]
        return {"y": np.stack([[states[step.slot]] * 2 for step in steps]).astype(np.float32)}

    def dispatch_step(
        self, inputs: Mapping[str, Value], steps: Sequence[Step], *, replica: int = 0
    ) -> InFlight:
        raise NotImplementedError


class Pinned(Sums):
    """Sums of sequences that keep their row."""

    batching = SequenceBatching(idle_microseconds=60_000_000, is_direct=True)


class Hasty(Sums):
    """Sums of sequences that expire after a millisecond."""

    batching = SequenceBatching(idle_microseconds=1000, max_candidates=1)


Ask = Callable[..., "asyncio.Task[float]"]


@pytest.fixture
def batch_limit() -> int:
    return 4


@pytest.fixture
async def sums(core: Core, world: World, add_model: AddModel, batch_limit: int) -> Core:
    return await loaded(core, world, add_model, Sums, batch_limit)


async def loaded(
    core: Core, world: World, add_model: AddModel, kind: type[Sums], batch_limit: int = 4
) -> Core:
    world.model_type, world.batch_limit = kind, batch_limit
    add_model("m", {1: 0.0})
    await core.control.load("m")
    return core


def model_of(core: Core) -> Sums:
    found = core.registry.resolve("m")[1].runner
    assert isinstance(found, Sums)
    return found


def ask(core: Core, id: object, value: float, flags: str = "") -> "asyncio.Task[float]":
    """Send a request immediately; `s` in `flags` starts its sequence and `e` ends it."""
    return asyncio.ensure_future(answer_to(begin(core, id, value, flags)))


async def answer_to(call: AwaitedInfer) -> float:
    async with asyncio.timeout(30):
        response = await call.answered()
    return float(response.outputs[0].data[0, 0])


def begin(core: Core, id: object, value: float, flags: str = "") -> AwaitedInfer:
    data = np.full((1, 2), value, np.float32)
    parameters: dict[str, Any] = {"sequence_id": id} if id is not None else {}
    parameters |= {"sequence_start": "s" in flags, "sequence_end": "e" in flags}
    request = InferRequest("m", inputs=(InferInput("x", FP32, data),), parameters=parameters)
    call = AwaitedInfer()
    core.engine.begin(call, request)
    return call


async def begun(core: Core) -> None:
    """Wait until a batch has begun with every request that fits in it."""
    while core.registry.resolve("m")[1].pending:
        await asyncio.sleep(0.001)


# --- in order, and together ----------------------------------------------------------------------


async def test_sequences_share_batches_and_requests_of_one_do_not(sums: Core, world: World) -> None:
    world.may_execute.clear()
    tasks = [ask(sums, id, id, "s") for id in (1, 2, 3)]
    tasks += [ask(sums, id, 10, "e") for id in (1, 2, 3)]
    world.may_execute.set()

    assert await asyncio.gather(*tasks) == [1, 2, 3, 11, 12, 13]
    assert model_of(sums).batches == [[1, 2, 3], [1, 2, 3]]


async def test_statistics_count_batches_of_sequences(sums: Core) -> None:
    await asyncio.gather(*[ask(sums, id, 1, "se") for id in (1, 2, 3)])
    statistics = sums.registry.resolve("m")[0].statistics

    assert (statistics.totals().inference_count, statistics.totals().execution_count) == (3, 1)


async def test_ids_are_integers_or_strings(sums: Core) -> None:
    tasks = [ask(sums, 7, 1, "s"), ask(sums, "7", 2, "s"), ask(sums, 7, 1), ask(sums, "7", 1)]

    assert await asyncio.gather(*tasks) == [1, 2, 2, 3]


async def test_each_replica_has_its_sequences(
    make_core: MakeCore, world: World, add_model: AddModel
) -> None:
    world.replicas = 2
    core = await loaded(make_core(), world, add_model, Sums)
    first = [ask(core, id, id, "s") for id in range(1, 7)]

    assert await asyncio.gather(*first) == list(range(1, 7))
    assert await asyncio.gather(*[ask(core, id, 10) for id in range(1, 7)]) == list(range(11, 17))
    # Evenly distributed: each replica has a batch of three.
    assert sorted(map(len, model_of(core).batches)) == [3, 3, 3, 3]


async def test_pinned_sequences_keep_their_row(
    core: Core, world: World, add_model: AddModel
) -> None:
    await loaded(core, world, add_model, Pinned)
    seen: list[list[tuple[int, bool]]] = []
    model, step = model_of(core), model_of(core).step

    def watched(inputs: Any, steps: Sequence[Step], *, replica: int = 0) -> Mapping[str, Tensor]:
        seen.append([(row, one.is_ready) for row, one in enumerate(steps)])
        assert all(row == one.slot for row, one in enumerate(steps) if one.is_ready)
        return step(inputs, steps, replica=replica)

    model.step = watched  # type: ignore[method-assign]
    await asyncio.gather(*[ask(core, id, id, "s") for id in (1, 2, 3)])

    assert [*await asyncio.gather(ask(core, 3, 10, "e"), ask(core, 1, 10))] == [13, 11]
    assert seen[-1] == [(0, True), (1, False), (2, True)]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("id", [None, 0, ""])
async def test_a_request_without_a_sequence_is_refused(sums: Core, id: object) -> None:
    with pytest.raises(MissingSequence):
        await ask(sums, id, 1, "s")


async def test_a_sequence_that_was_not_started_is_refused(sums: Core) -> None:
    with pytest.raises(SequenceNotStarted, match="sequence 5 to model 'm' must specify the START"):
        await ask(sums, 5, 1)


async def test_an_id_has_a_bounded_length(sums: Core) -> None:
    with pytest.raises(InvalidParameter, match="at most 128 characters, got 129 characters"):
        await ask(sums, "x" * 129, 1, "s")

    assert await ask(sums, "x" * 128, 1, "s") == 1


async def test_several_rows_of_a_sequence_are_refused(sums: Core) -> None:
    data = np.zeros((2, 2), np.float32)
    parameters: Any = {"sequence_id": 1, "sequence_start": True}
    with pytest.raises(SequenceRows, match="got 2 rows"):
        await sums.engine.infer(
            InferRequest("m", inputs=(InferInput("x", FP32, data),), parameters=parameters)
        )


async def test_an_id_that_the_model_cannot_be_told_begins_nothing(sums: Core) -> None:
    with pytest.raises(InvalidParameter):
        await ask(sums, "wrong", 1, "s")
    with pytest.raises(SequenceNotStarted):
        await ask(sums, 1, 1)


async def test_requests_in_progress_have_a_limit(
    make_core: MakeCore, world: World, add_model: AddModel
) -> None:
    core = await loaded(make_core(max_requests_per_model=2), world, add_model, Sums)
    world.may_execute.clear()
    tasks = [ask(core, 1, 1, "s"), ask(core, 1, 1)]
    with pytest.raises(Overloaded):
        await ask(core, 1, 1)
    world.may_execute.set()

    assert await asyncio.gather(*tasks) == [1, 2]


# # --- failures -----------------------------------------------------------------------------------


async def test_a_request_that_is_cancelled_while_it_waits_has_not_happened(
    sums: Core, world: World
) -> None:
    """Nor have the requests after it: the state is that of the last executed request."""
    world.may_execute.clear()
    first, second, third = ask(sums, 1, 1, "s"), ask(sums, 1, 10), ask(sums, 1, 100)
    other = ask(sums, 2, 5, "s")
    await begun(sums)
    second.cancel()
    with pytest.raises(SequenceInterrupted, match="an earlier request of sequence 1 failed"):
        await third
    world.may_execute.set()

    assert [*await asyncio.gather(first, other)] == [1, 5]
    assert await ask(sums, 1, 1000 - 1) == 1000


async def test_a_request_that_is_cancelled_in_the_queue_is_not_executed(
    sums: Core, world: World
) -> None:
    world.may_execute.clear()
    first = ask(sums, 1, 1, "s")
    await begun(sums)
    second = ask(sums, 2, 1, "s")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    world.may_execute.set()

    assert [*await asyncio.gather(first, ask(sums, 3, 1, "s"))] == [1, 1]
    assert model_of(sums).batches == [[1], [3]]


async def test_a_request_that_is_cancelled_while_it_executes_has_happened(
    sums: Core, world: World
) -> None:
    world.may_execute.clear()
    first = ask(sums, 1, 1, "s")
    await begun(sums)
    second = ask(sums, 1, 10)
    first.cancel()
    await asyncio.sleep(0)
    world.may_execute.set()

    assert await second == 11


async def test_a_request_that_fails_may_be_sent_again(sums: Core) -> None:
    await ask(sums, 1, 1, "s")
    fails, waits = ask(sums, 1, FAILS), ask(sums, 1, 10)
    with pytest.raises(ArithmeticError):
        await fails
    with pytest.raises(SequenceInterrupted):
        await waits

    assert await ask(sums, 1, 10) == 11


async def test_sequences_whose_states_are_lost_have_to_be_started_again(sums: Core) -> None:
    await asyncio.gather(ask(sums, 1, 1, "s"), ask(sums, 2, 1, "s"))
    with pytest.raises(StatesLost):
        await ask(sums, 1, LOSES)
    for id in (1, 2):
        with pytest.raises(SequenceNotStarted):
            await ask(sums, id, 1)

    assert await ask(sums, 2, 3, "s") == 3


async def test_a_deadline_that_passes_in_the_queue_interrupts_the_sequence(
    sums: Core, world: World
) -> None:
    world.may_execute.clear()
    first = ask(sums, 1, 1, "s")
    second, third = begin(sums, 1, 10), ask(sums, 1, 100)
    second.expire()
    with pytest.raises(DeadlineExceeded):
        await second.answered()
    with pytest.raises(SequenceInterrupted):
        await third
    world.may_execute.set()

    assert await first == 1
    assert await ask(sums, 1, 1) == 2


async def test_one_more_sequence_than_slots_waits(sums: Core) -> None:
    await asyncio.gather(*[ask(sums, id, 1, "s") for id in range(1, 5)])
    waits = begin(sums, 5, 7, "s")
    await asyncio.sleep(0.01)

    assert not waits.has_ended
    assert [waits.submitted_ns] == list(sums.registry.resolve("m")[1].station.pending_since())
    await ask(sums, 1, 1, "e")
    assert (await waits.answered()).outputs[0].data[0, 0] == 7


async def test_a_turn_that_waits_for_its_batch_is_as_old_as_its_request(
    sums: Core, world: World
) -> None:
    world.may_execute.clear()
    first = begin(sums, 1, 1, "s")
    await begun(sums)
    second = begin(sums, 2, 1, "s")
    station = sums.registry.resolve("m")[1].station
    waiting = list(station.pending_since())
    world.may_execute.set()
    await asyncio.gather(first.answered(), second.answered())

    assert [second.submitted_ns] == waiting
    assert [] == list(station.pending_since())


async def test_a_sequence_that_nobody_goes_on_with_frees_its_slot(
    core: Core, world: World, add_model: AddModel
) -> None:
    """Its client has left or stopped sending (max_sequence_idle_microseconds)."""
    await loaded(core, world, add_model, Hasty)
    await ask(core, 1, 1, "s")

    assert await ask(core, 2, 2, "s") == 2
    with pytest.raises(SequenceNotStarted):
        await ask(core, 1, 1)


async def test_what_has_come_is_answered_before_an_unload(sums: Core, world: World) -> None:
    world.may_execute.clear()
    tasks = [ask(sums, 1, 1, "s"), ask(sums, 1, 2), ask(sums, 2, 5, "s")]
    unloading = asyncio.ensure_future(sums.control.unload("m"))
    while sums.registry.ready("m"):
        await asyncio.sleep(0)
    with pytest.raises((ModelNotFound, ModelNotReady)):
        await ask(sums, 1, 1)
    world.may_execute.set()

    assert await asyncio.gather(*tasks) == [1, 3, 5]
    await unloading
    assert not world.open


async def test_sequences_do_not_outlive_a_reload(sums: Core, add_model: AddModel) -> None:
    await ask(sums, 1, 1, "s")
    add_model("m", {1: 1.0})
    await sums.control.load("m")
    with pytest.raises(SequenceNotStarted):
        await ask(sums, 1, 1)

    assert await ask(sums, 1, 4, "s") == 4


async def test_a_server_that_drains_answers_what_has_come_and_refuses_the_rest(
    sums: Core, world: World
) -> None:
    world.may_execute.clear()
    tasks = [ask(sums, 1, 1, "s"), ask(sums, 1, 2)]
    sums.gates.drain()
    with pytest.raises(ShuttingDown):
        await ask(sums, 1, 1)
    world.may_execute.set()

    assert await asyncio.gather(*tasks) == [1, 3]


class Patient(Sums):
    """Sums whose batches wait for three sequences, or a minute."""

    batching = SequenceBatching(
        idle_microseconds=60_000_000,
        max_candidates=8,
        preferred_batch_size=(3,),
        max_queue_delay_microseconds=60_000_000,
    )


async def test_batches_wait_for_a_preferred_size(
    core: Core, world: World, add_model: AddModel
) -> None:
    await loaded(core, world, add_model, Patient)
    tasks = [ask(core, id, id, "s") for id in (1, 2)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in tasks)
    tasks.append(ask(core, 3, 3, "s"))

    assert await asyncio.gather(*tasks) == [1, 2, 3]
    assert model_of(core).batches == [[1, 2, 3]]


class Hurried(Pinned):
    """Sums of sequences that keep their row, whose batches wait for half of the slots."""

    batching = SequenceBatching(
        idle_microseconds=60_000_000,
        is_direct=True,
        minimum_slot_utilization=0.5,
        max_queue_delay_microseconds=60_000_000,
    )


async def test_pinned_batches_wait_for_their_part_of_the_slots(
    core: Core, world: World, add_model: AddModel
) -> None:
    await loaded(core, world, add_model, Hurried)
    first = ask(core, 1, 1, "s")
    await asyncio.sleep(0.01)
    assert not first.done()

    assert [*await asyncio.gather(first, ask(core, 2, 2, "s"))] == [1, 2]


async def test_a_step_of_an_ensemble_has_the_sequence_of_its_request(
    sums: Core, add_model: AddModel
) -> None:
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    add_model(
        "e",
        {1: 0.0},
        {
            "platform": "ensemble",
            "max_batch_size": 4,
            "input": [{"name": "x", **tensor}],
            "output": [{"name": "z", **tensor}],
            "ensemble_scheduling": {
                "step": [
                    {
                        "model_name": "m",
                        "model_version": -1,
                        "input_map": {"x": "x"},
                        "output_map": {"y": "z"},
                    }
                ]
            },
        },
    )
    await sums.control.load("e")
    found = []
    for value, flag in ((1, "sequence_start"), (2, "sequence_end")):
        data = np.full((1, 2), value, np.float32)
        parameters: Any = {"sequence_id": 5, flag: True}
        request = InferRequest("e", inputs=(InferInput("x", FP32, data),), parameters=parameters)
        with capture_logs() as lines:
            response = await sums.engine.infer(request)
        assert not lines, "parameters without effect"
        found.append(float(response.outputs[0].data[0, 0]))

    assert found == [1, 3]
