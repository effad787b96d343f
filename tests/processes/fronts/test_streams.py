"""Streams of answers that a front end forwards, over real sockets in one process."""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.conditions import until
from support.core import World
from support.fronts import Joined, Noting, Side, connect, joined

from xlaserve.errors import Decoupled, EngineLost, InvalidRequest
from xlaserve.net.ledger import Kind as Purpose
from xlaserve.python_models.process.slab import LEAST_BYTES
from xlaserve.runtime.loaded import Answer, Value
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.answers import answer_last
from xlaserve.serving.infer_call import AwaitedInfer, Executed, InferCall
from xlaserve.serving.inference import InferInput, InferRequest, InferResponse
from xlaserve.tensors import DATATYPES, Parameter
from xlaserve.workers.fronts.streams import MOST_ANSWERS, MOST_BYTES

AHEAD = 20
"""Answers that may be computed ahead of sending: 16, plus those of one step."""
ENDLESS = 100_000


class Counting(Noting):
    """Answers `x = [[count, size]]` with `count` tensors of `size` elements: of 0, of 1, ..."""

    def __init__(self, world: World) -> None:
        super().__init__(0, world)
        self.info = replace(self.info, is_decoupled=True)
        self.computed: dict[int, int] = {}
        """Number of answers computed, by the requested size."""
        self.closed_answers = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def generate(
        self, inputs: Mapping[str, Value], parameters: Mapping[str, Parameter], *, replica: int = 0
    ) -> Iterator[Answer]:
        given: Any = inputs["x"]
        count, size = map(int, given[0])
        try:
            for number in range(abs(count)):
                if number:
                    assert self.may_go_on.wait(60)
                self.computed[size] = number + 1
                yield Answer({"y": np.full((1, size), number, np.float32)})
            if count < 0:
                raise InvalidRequest("it cannot count so far")
        finally:
            self.closed_answers += 1


class Reading(InferCall):
    """A client of a stream, which reads or not."""

    takes_many = True

    def __init__(self) -> None:
        self.reads = True
        self.principal = Principal("ann")
        self.given: list[tuple[list[float], bool]] = []
        """The first element of each answer, if any, and whether it is the last answer."""
        self.error: BaseException | None = None

    @property
    def is_writable(self) -> bool:
        return self.reads

    def write(self, response: InferResponse, *, last: bool) -> None:
        self.given.append(([float(one.data[0, 0]) for one in response.outputs], last))

    def refuse(self, error: BaseException) -> None:
        self.error = error

    def read_on(self) -> None:
        self.reads = True
        self.resume()


@pytest.fixture(name="model")
def a_model() -> Counting:
    return Counting(World())


def ask(side: Side, count: int, size: int = 1, *, reads: bool = True) -> Reading:
    """Send a request for `count` answers."""
    call = Reading()
    call.reads = reads
    begin(side, call, count, size)
    return call


def begin(side: Side, call: InferCall, count: int, size: int) -> None:
    data = np.array([[count, size]], np.float32)
    side.engine.begin(call, InferRequest("m", inputs=(InferInput("x", DATATYPES["FP32"], data),)))


def statistics(side: Side) -> tuple[int, int]:
    totals = side.registry.version("m", "1").statistics.totals()
    return totals.success.count, totals.fail.count


async def is_idle(pair: Joined, model: Counting, streams: int = 1) -> None:
    """Wait until neither process holds anything for this many streams."""
    await until(lambda: model.closed_answers == streams)
    await until(lambda: pair.side.registry.requests == pair.ends[0].registry.requests == 0)
    await until(lambda: pair.side.ledger.held == pair.ends[0].ledger.held == 0)
    assert all(not front._calls for front in pair.fronts._connected)
    assert not pair.front_ends[0]._calls
    assert not pair.front_ends[0]._streams


@pytest.mark.parametrize("size", [1, LEAST_BYTES // 4])
async def test_answers_come_one_by_one(model: Counting, size: int) -> None:
    """More than can be in flight; the last one is marked, and the request is counted once."""
    count = 5 * MOST_ANSWERS
    async with joined(model) as pair:
        call = ask(pair.ends[0], count, size)
        await until(lambda: call.has_ended)
        await is_idle(pair, model)

        expected = [([float(number)], False) for number in range(count)]
        assert [*expected, ([], True)] == call.given
        assert [(1, 0), (0, 0)] == [statistics(side) for side in (pair.side, pair.ends[0])]


async def test_the_first_answer_does_not_wait_for_the_second(model: Counting) -> None:
    """It is delivered immediately."""
    model.may_go_on.clear()
    async with joined(model) as pair:
        call = ask(pair.ends[0], 2)
        await until(lambda: call.given)
        assert [([0.0], False)] == call.given
        model.may_go_on.set()
        await until(lambda: call.has_ended)


async def test_a_client_that_does_not_read_holds_back_its_own_answers(model: Counting) -> None:
    """Its model pauses, while another client gets all answers that it asked for."""
    async with joined(model) as pair:
        slow = ask(pair.ends[0], 1000, 1, reads=False)
        await until(lambda: len(slow.given) == MOST_ANSWERS)
        quick = ask(pair.ends[0], 500, 2)
        await until(lambda: quick.has_ended)
        assert len(quick.given) == 501
        assert len(slow.given) == MOST_ANSWERS
        assert model.computed[1] <= MOST_ANSWERS + AHEAD
        slow.read_on()
        await until(lambda: slow.has_ended)
        assert len(slow.given) == 1001
        await is_idle(pair, model, 2)


@pytest.mark.parametrize("size", [LEAST_BYTES // 8, LEAST_BYTES, MOST_BYTES])
async def test_what_a_client_does_not_read_is_on_the_ledger(model: Counting, size: int) -> None:
    """Up to a byte limit over both processes, plus one longer answer."""
    async with joined(model) as pair:
        slow = ask(pair.ends[0], 1000, size, reads=False)
        await until(lambda: len(slow.given) == -(-MOST_BYTES // (4 * size)))
        quick = ask(pair.ends[0], 100)
        await until(lambda: quick.has_ended)
        assert len(slow.given) == -(-MOST_BYTES // (4 * size))
        assert model.computed[size] <= len(slow.given) + AHEAD
        counted = pair.side.ledger.held_for(Purpose.ANSWERS)
        if 4 * size < LEAST_BYTES:
            assert counted == 4 * size * len(slow.given)
        slow.cancel()
        await is_idle(pair, model, 2)


async def test_what_a_client_has_read_is_not_counted(model: Counting) -> None:
    """Whatever the total size read so far."""
    size = LEAST_BYTES // 8
    async with joined(model) as pair:
        call = ask(pair.ends[0], ENDLESS, size)
        await until(lambda: len(call.given) > 3 * MOST_BYTES // (4 * size))
        assert pair.side.ledger.held_for(Purpose.ANSWERS) <= MOST_BYTES
        call.cancel()
        await is_idle(pair, model)


async def test_a_cancel_ends_the_answers(model: Counting) -> None:
    """The engine also stops, and counts one failure."""
    async with joined(model) as pair:
        call = ask(pair.ends[0], ENDLESS)
        await until(lambda: len(call.given) > 2 * MOST_ANSWERS)
        call.cancel()
        await is_idle(pair, model)

        assert model.computed[1] < ENDLESS
        assert [(0, 1), (0, 0)] == [statistics(side) for side in (pair.side, pair.ends[0])]


async def test_a_client_that_has_enough_has_not_failed(model: Counting) -> None:
    """The answer is complete before the model ends it: a stop string, or a tool call."""
    async with joined(model) as pair:
        call = ask(pair.ends[0], ENDLESS)
        await until(lambda: len(call.given) > 2 * MOST_ANSWERS)
        answer_last(call, Executed({}, 0, 1, 1))
        await is_idle(pair, model)

        assert model.computed[1] < ENDLESS
        assert [(1, 0), (0, 0)] == [statistics(side) for side in (pair.side, pair.ends[0])]


async def test_an_error_comes_behind_the_answers(model: Counting) -> None:
    """It keeps its class."""
    async with joined(model) as pair:
        call = ask(pair.ends[0], -3)
        await until(lambda: call.has_ended)

        assert isinstance(call.error, InvalidRequest)
        assert [([0.0], False), ([1.0], False), ([2.0], False)] == call.given
        assert [(0, 1), (0, 0)] == [statistics(side) for side in (pair.side, pair.ends[0])]


async def test_a_client_that_takes_one_answer_is_refused_as_by_one_process(
    model: Counting,
) -> None:
    """The engine knows whether its model can combine the answers."""
    async with joined(model) as pair:
        call = AwaitedInfer()
        begin(pair.ends[0], call, 2, 1)
        with pytest.raises(Decoupled):
            await call.answered()


async def test_the_caller_crosses_once(model: Counting) -> None:
    """It is used for fair ordering; the front end has already checked its identity."""
    model.may_go_on.clear()
    async with joined(model) as pair:
        call = ask(pair.ends[0], 2)
        await until(lambda: call.given)
        (passed,) = next(iter(pair.fronts._connected))._calls.values()
        assert passed.principal is not None
        assert ("ann", True) == (passed.principal.name, passed.takes_many)
        model.may_go_on.set()
        await until(lambda: call.has_ended)


async def test_an_instance_that_leaves_answers_its_streams_to_the_end(model: Counting) -> None:
    """The same instance continues them: another one could not take over."""
    model.may_go_on.clear()
    async with joined(model) as pair:
        call = ask(pair.ends[0], 100)
        await until(lambda: call.given)
        instance = pair.side.registry.version("m", "1").instance
        assert instance is not None
        new = Counting(World())
        pair.side.load(new)
        instance.leave()
        await pair.shown()
        later = ask(pair.ends[0], 2, 3)
        await until(lambda: later.has_ended)
        model.may_go_on.set()
        await until(lambda: call.has_ended)
        assert (101, 100, {3: 2}) == (len(call.given), model.computed[1], new.computed)
        await until(lambda: instance.users == 0)


async def test_an_engine_that_dies_ends_the_streams(model: Counting) -> None:
    """An error follows the answers already sent."""
    async with joined(model) as pair:
        calls = [ask(pair.ends[0], ENDLESS), ask(pair.ends[0], ENDLESS, 2, reads=False)]
        await until(lambda: all(len(call.given) >= MOST_ANSWERS for call in calls))
        next(iter(pair.fronts._connected)).bridge.close()
        await until(lambda: all(call.has_ended for call in calls))
        assert [True, True] == [isinstance(call.error, EngineLost) for call in calls]
        await until(lambda: model.closed_answers == 2)
        await connect(pair.fronts, pair.front_ends[0])
        call = ask(pair.ends[0], 3)
        await until(lambda: call.has_ended)
        assert len(call.given) == 4
        await is_idle(pair, model, 3)


async def test_a_front_end_that_dies_leaves_nothing(model: Counting) -> None:
    """The engine stops computing and releases the bytes; other front ends read on."""
    async with joined(model, count=2) as pair:
        ask(pair.ends[0], ENDLESS, 2, reads=False)
        other = ask(pair.ends[1], ENDLESS, 1)
        await until(lambda: len(other.given) > MOST_ANSWERS)
        bridge = pair.front_ends[0]._bridge
        assert bridge is not None
        bridge.close()
        await until(lambda: model.closed_answers == 1)
        before = len(other.given)
        await until(lambda: len(other.given) > before + 2 * MOST_ANSWERS)
        other.cancel()
        await until(lambda: pair.side.registry.requests == pair.side.ledger.held == 0)


async def test_what_a_model_holds_for_a_stream_is_on_the_ledger(model: Counting) -> None:
    """Until the stream ends."""
    model.info = replace(model.info, state_bytes=1 << 20)
    model.may_go_on.clear()
    async with joined(model) as pair:
        call = ask(pair.ends[0], 2)
        await until(lambda: call.given)
        assert pair.side.ledger.held >= 1 << 20
        model.may_go_on.set()
        await until(lambda: call.has_ended)
        await is_idle(pair, model)


async def test_answers_that_were_not_sent_cannot_be_taken(model: Counting) -> None:
    """Acknowledging unsent answers is a protocol error, which ends the bridge."""
    model.may_go_on.clear()
    async with joined(model) as pair:
        call = ask(pair.ends[0], 2)
        await until(lambda: call.given)
        ((number, _),) = pair.front_ends[0]._calls.items()
        pair.front_ends[0]._note_taken(number, 2)
        await until(lambda: pair.front_ends[0]._bridge is None)
        assert isinstance(call.error, EngineLost)
        model.may_go_on.set()
