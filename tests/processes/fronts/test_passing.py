"""Inferences that a front end forwards to the engine, over real sockets in one process."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.conditions import until
from support.core import World
from support.fronts import SLABS, Joined, Noting, Side, connect, joined

from xlaserve.errors import (
    DeadlineExceeded,
    EngineGone,
    EngineLost,
    InvalidRequest,
    ModelNotReady,
    Overloaded,
)
from xlaserve.errors.access import HIDDEN
from xlaserve.python_models.process.slab import LEAST_BYTES
from xlaserve.serving.access.models import CallerSight, ModelNames
from xlaserve.serving.call import Operation
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.serving.standing import Standing, State
from xlaserve.tensors import DATATYPES
from xlaserve.workers.fronts.front_end import Limits

WIDE = LEAST_BYTES // 4
"""Elements of a row large enough for the slab."""


@pytest.fixture(name="world")
def a_world() -> World:
    """Models that execute without a gate, in a thread, in batches of up to four rows."""
    world = World(batch_limit=4)
    world.may_execute.set()
    return world


def statistics(side: Side) -> tuple[int, int]:
    """Return how many requests of `m` this process counts as answered and as failed."""
    totals = side.registry.version("m", "1").statistics.totals()
    return totals.success.count, totals.fail.count


def begun(side: Side, deadline: float | None = None) -> AwaitedInfer:
    """Begin a request for `m`, and return its call."""
    call = AwaitedInfer(deadline=deadline)
    data = np.zeros((1, 2), np.float32)
    request = InferRequest("m", inputs=(InferInput("x", DATATYPES["FP32"], data),))
    side.engine.begin(call, request)
    return call


async def begin_held(pair: Joined, world: World, model: Noting) -> AwaitedInfer:
    """Begin a request whose execution blocks until the test releases it."""
    world.may_execute.clear()
    call = begun(pair.ends[0])
    await until(lambda: bool(model.rows))
    return call


async def test_an_answer_is_that_of_the_engine(world: World) -> None:
    """It has the request's id, and is counted once, by the engine."""
    async with joined(Noting(1, world)) as pair:
        response = await pair.ends[0].infer(2, id="abc")

        assert ("m", "1", "abc") == (response.model_name, response.model_version, response.id)
        assert [[1, 2], [3, 4]] == response.outputs[0].data.tolist()
        assert [(1, 0), (0, 0)] == [statistics(side) for side in (pair.side, pair.ends[0])]


async def test_requests_of_several_front_ends_are_one_batch(world: World) -> None:
    """They share the queue of the engine."""
    model = Noting(1, world)
    async with joined(model, count=2) as pair:
        first = await begin_held(pair, world, model)
        calls = [begun(end) for end in pair.ends]
        await until(lambda: pair.side.registry.requests == 3)
        world.may_execute.set()
        for call in (first, *calls):
            await call.answered()

    assert [1, 2] == model.rows


@pytest.mark.parametrize("rows", [1, 4])
async def test_large_tensors_pass_through_the_slab(world: World, rows: int) -> None:
    """In both directions; slab memory and ledger reservations are released afterwards."""
    seen: list[Any] = []

    class Seeing(Noting):
        def execute(self, inputs: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
            seen.append((inputs["x"].flags.owndata, inputs["x"].flags.writeable))
            seen.append((pair.ends[0].ledger.held, pair.side.ledger.held))
            return super().execute(inputs, **more)

    async with joined(Seeing(1, world, WIDE)) as pair:
        response = await pair.ends[0].infer(rows, width=WIDE)
        count = rows * WIDE

        assert np.array_equal(response.outputs[0].data.ravel(), np.arange(1, count + 1))
        assert [(False, False), (4 * count, 0)] == seen
        assert pair.side.ledger.held == 4 * count
        del response
        await until(lambda: pair.ends[0].ledger.held == 0)
        await until(lambda: pair.side.ledger.held == 0)


async def test_tensors_for_which_the_slab_has_no_memory_pass_too(world: World) -> None:
    """They travel outside of the slab: no request is refused for its size."""
    width = SLABS // 4
    async with joined(Noting(1, world, width)) as pair:
        response = await pair.ends[0].infer(1, width=width)

        assert response.outputs[0].data[0, -1] == width
        assert (0, 0) == (pair.ends[0].ledger.held, pair.side.ledger.held)


async def test_an_error_has_its_class_and_its_text(world: World) -> None:
    """The client gets the same status as from a single process."""

    class Refusing(Noting):
        def execute(self, inputs: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
            raise InvalidRequest('input "x": expected less, got more')

    async with joined(Refusing(1, world)) as pair:
        with pytest.raises(InvalidRequest, match='input "x": expected less, got more'):
            await pair.ends[0].infer()

        assert [(0, 1), (0, 0)] == [statistics(side) for side in (pair.side, pair.ends[0])]


async def test_an_error_names_no_model_that_the_caller_may_not_see(world: World) -> None:
    """The engine does not know the caller, but the front end does."""

    class Refusing(Noting):
        def execute(self, inputs: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
            raise InvalidRequest("model 'm': its step 'theirs' has no 'x', model: 'theirs'")

    told = []
    async with joined(Refusing(1, world)) as pair:
        for seen in (None, ("m",), ("m", "theirs")):
            call = AwaitedInfer()
            if seen is not None:
                names = ModelNames(seen)
                call.sight = CallerSight(
                    "a", Operation.INFER, names, names, Standing(State.SETTLED)
                )
            data = np.zeros((1, 2), np.float32)
            inputs = (InferInput("x", DATATYPES["FP32"], data),)
            pair.ends[0].engine.begin(call, InferRequest("m", inputs=inputs))
            with pytest.raises(InvalidRequest) as caught:
                await call.answered()
            told.append(str(caught.value))

    whole = "model 'm': its step 'theirs' has no 'x', model: 'theirs'"
    hidden = whole.replace("'theirs'", HIDDEN)
    assert [whole, hidden, whole] == told


async def test_what_a_front_end_refuses_is_counted_there(world: World) -> None:
    """The engine never receives the request."""
    async with joined(Noting(1, world)) as pair:
        with pytest.raises(InvalidRequest):
            await pair.ends[0].infer(width=3)

        assert [(0, 0), (0, 1)] == [statistics(side) for side in (pair.side, pair.ends[0])]


async def test_a_cancel_crosses(world: World) -> None:
    """A request leaves the engine's queue."""
    model = Noting(1, world)
    async with joined(model) as pair:
        first = await begin_held(pair, world, model)
        call = begun(pair.ends[0])
        await until(lambda: pair.side.registry.requests == 2)
        call.cancel()
        await until(lambda: pair.side.registry.requests == 1)
        world.may_execute.set()
        await first.answered()

    assert [1] == model.rows


async def test_a_deadline_crosses(world: World) -> None:
    """The engine enforces it, and the front end reports it to the client."""
    model = Noting(1, world)
    async with joined(model) as pair:
        await begin_held(pair, world, model)
        call = begun(pair.ends[0], asyncio.get_running_loop().time() + 0.05)
        await until(lambda: pair.side.registry.requests == 2)
        (waiting,) = [
            one for one in next(iter(pair.fronts._connected))._calls.values() if one.deadline
        ]
        assert waiting.deadline == call.deadline
        with pytest.raises(DeadlineExceeded):
            await call.answered()
        await until(lambda: pair.side.registry.requests == 1)
        world.may_execute.set()


async def test_the_requests_that_the_engine_has_are_bounded(world: World) -> None:
    """The error for one more names the setting; an answer frees a slot."""
    model = Noting(1, world)
    async with joined(model, limits=Limits(SLABS, requests=1)) as pair:
        first = await begin_held(pair, world, model)
        with pytest.raises(Overloaded, match="max_front_end_requests"):
            await pair.ends[0].infer()
        world.may_execute.set()
        await first.answered()
        await pair.ends[0].infer()


async def test_a_front_end_that_dies_has_no_requests(world: World) -> None:
    """The engine cancels them, and answers those of other front ends."""
    model = Noting(1, world)
    async with joined(model, count=2) as pair:
        first = await begin_held(pair, world, model)
        second = begun(pair.ends[1])
        begun(pair.ends[1])
        await until(lambda: pair.side.registry.requests == 3)
        bridge = pair.front_ends[0]._bridge
        assert bridge is not None
        bridge.close()
        await until(lambda: pair.side.registry.requests == 2)
        world.may_execute.set()
        with pytest.raises(EngineLost):
            await first.answered()
        await second.answered()


async def test_an_engine_that_dies_leaves_no_request_unanswered(world: World) -> None:
    """INTERNAL if it was executing; UNAVAILABLE if queued, and until the next engine is ready."""
    model = Noting(1, world)
    async with joined(model) as pair:
        call = await begin_held(pair, world, model)
        waits = begun(pair.ends[0])
        await until(lambda: pair.side.registry.requests == 2)
        (front,) = pair.fronts._connected
        front.bridge.close()
        with pytest.raises(EngineLost):
            await call.answered()
        with pytest.raises(EngineGone):
            await waits.answered()
        with pytest.raises(ModelNotReady, match="the engine process ended and is being replaced"):
            await pair.ends[0].infer()
        world.may_execute.set()
        await connect(pair.fronts, pair.front_ends[0])
        response = await pair.ends[0].infer()

        assert [[1, 2]] == response.outputs[0].data.tolist()


async def test_an_engine_that_has_not_everything_yet_is_not_shown(world: World) -> None:
    """A model that the engine is about to load is not ready; NOT_FOUND would be wrong."""
    async with joined(Noting(1, world)) as pair, joined() as other:
        front = pair.front_ends[0]
        front.may_show = lambda: False
        assert front._bridge is not None
        front._bridge.close()
        await connect(other.fronts, front)
        with pytest.raises(ModelNotReady):
            await pair.ends[0].infer()
        other.side.load(Noting(5, world))
        front.may_show = lambda: True
        await other.shown()
        front.show()
        response = await pair.ends[0].infer()

        assert [[5, 6]] == response.outputs[0].data.tolist()


async def test_an_instance_that_leaves_serves_what_was_passed_to_it(world: World) -> None:
    """It serves until every front end has confirmed that it shows another instance."""
    old = Noting(1, world)
    async with joined(old) as pair:
        instance = pair.side.registry.version("m", "1").instance
        assert instance is not None
        pair.side.load(Noting(5, world))
        instance.leave()
        assert instance.users == 1
        before = begun(pair.ends[0])
        await until(lambda: instance.users == 0)
        after = await pair.ends[0].infer()

        assert [[1, 1]] == (await before.answered()).outputs[0].data.tolist()
        assert [[5, 6]] == after.outputs[0].data.tolist()


@pytest.mark.parametrize(
    "record",
    [(99,), (0,), "text", (3, [64])],
)
async def test_what_is_of_no_request_and_cannot_be_read_ends_the_bridge(
    world: World, record: Any
) -> None:
    """The model is not ready afterwards."""
    async with joined(Noting(1, world)) as pair:
        bridge = pair.front_ends[0]._bridge
        assert bridge is not None
        bridge.say(record)
        await until(lambda: pair.front_ends[0]._bridge is None)
        with pytest.raises(ModelNotReady):
            await pair.ends[0].infer()


@pytest.mark.parametrize(
    "record",
    [(0, 99), (0, 99, 1, "", 0, [0, [1], 4], 1, (), None, 0, None), (1, 99)],
)
async def test_what_cannot_be_read_of_a_request_is_that_requests(world: World, record: Any) -> None:
    """Other pending requests are answered."""
    async with joined(Noting(1, world)) as pair:
        bridge = pair.front_ends[0]._bridge
        assert bridge is not None
        call = begun(pair.ends[0])
        bridge.say(record)
        async with asyncio.timeout(60):
            answer = await call.answered()
            await pair.ends[0].infer()

        assert [[1, 1]] == answer.outputs[0].data.tolist()
        assert bridge is pair.front_ends[0]._bridge
