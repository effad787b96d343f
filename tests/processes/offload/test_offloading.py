"""Batches that one worker offloads to another, over real sockets in one process."""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from support.conditions import until
from support.offloading import SETTINGS, Pair, paired

from xlaserve.errors import EngineLost, InvalidRequest
from xlaserve.python_models.process.slab import LEAST_BYTES
from xlaserve.serving.statistics import Offloads
from xlaserve.workers.offload import peer as peers

WIDE = LEAST_BYTES // 4
"""Elements of a row large enough for the slab."""


async def given(pair: Pair, count: int = 4, rows: int = 1) -> Any:
    """Begin requests, and return their calls once the helper executes some of them."""
    calls = await pair.begin(count, rows)
    await until(lambda: pair.helper.model.rows)
    return calls


async def test_an_idle_worker_executes_what_waits() -> None:
    """Each request gets its own answer, and all are counted by the worker that received them."""
    async with paired() as pair:
        calls = await given(pair)
        pair.release()

        assert [1, 2, 3, 4, 5] == await pair.answers(calls)
        assert ([1], [4]) == (pair.home.model.rows, pair.helper.model.rows)
        assert (5, 0) == (pair.home.totals.success.count, pair.helper.totals.success.count)
        assert Offloads(1, 2 * 4 * 2 * 4) == pair.home.totals.offloads
        assert 2 == pair.home.totals.execution_count


async def test_a_worker_that_executes_is_given_nothing() -> None:
    """Its own requests come first; the queue is executed by the worker that has it."""
    async with paired() as pair:
        own = pair.helper.begin(7)
        await until(lambda: pair.helper.model.rows)
        await until(lambda: not pair.home.helping.are_idle)
        calls = await pair.begin(4)
        pair.release()

        assert [1, 2, 3, 4, 5] == await pair.answers(calls)
        assert [8] == await pair.answers([own])
        assert ([1, 4], [1]) == (pair.home.model.rows, pair.helper.model.rows)


async def test_a_worker_refuses_what_it_did_not_say_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has become busy meanwhile: the batch is executed by its owner, after the current one."""
    async with paired() as pair:
        # Delays the helper's update of the board.
        monkeypatch.setattr(pair.helper.helping, "_say", lambda: None)
        monkeypatch.setattr(pair.helper.helping, "_is_serving", False)
        calls = await pair.begin(4)
        await until(lambda: pair.home.totals.offloads.refused)
        pair.release()

        assert [1, 2, 3, 4, 5] == await pair.answers(calls)
        assert [] == pair.helper.model.rows


@pytest.mark.parametrize("mark", [("models/m/1", (("model", 7, 100, 1001),)), object()])
async def test_a_worker_with_other_files_refuses(mark: object) -> None:
    """This happens while workers reload a model one after the other."""
    async with paired(helper_mark=mark) as pair:
        calls = await pair.begin(4)
        await until(lambda: pair.home.totals.offloads.refused)
        pair.release()

        assert [1, 2, 3, 4, 5] == await pair.answers(calls)
        assert [] == pair.helper.model.rows


async def test_an_instance_that_leaves_is_offered_no_more() -> None:
    """Batches already given to it are executed: they keep the instance in use."""
    async with paired() as pair:
        calls = await given(pair)
        users = pair.helper.instance.users
        pair.helper.instance.leave()
        assert pair.helper.helping._offers.models == {}
        pair.release()

        assert [1, 2, 3, 4, 5] == await pair.answers(calls)
        assert (1, 0) == (users, pair.helper.instance.users)


async def test_a_batch_that_a_worker_dies_with_fails() -> None:
    """It is not retried: it may have caused the death."""
    async with paired() as pair:
        calls = await given(pair)
        pair.helper.helping._peers[0].bridge.close()
        found = await asyncio.gather(*(c.answered() for c in calls[1:]), return_exceptions=True)
        pair.release()

        assert [1] == await pair.answers(calls[:1])
        assert [True] * 4 == [isinstance(one, EngineLost) for one in found]
        assert "worker 1 process ended" in str(found[0])
        assert Offloads(lost=1) == pair.home.totals.offloads


async def test_a_batch_that_was_not_begun_is_executed_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The helper may be dead by then, but no client notices."""

    def dies(self: peers.Peer, record: object) -> None:
        raise LookupError("it dies before it begins")

    async with paired() as pair:
        monkeypatch.setattr(peers.Peer, "_begin", dies)
        calls = await pair.begin(4)
        await until(lambda: pair.home.totals.offloads.refused)
        pair.release()

        assert [1, 2, 3, 4, 5] == await pair.answers(calls)
        assert not pair.home.helping.are_idle


async def test_a_worker_has_one_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even before it reports that it has begun: a second batch would only be refused."""
    async with paired() as pair:
        monkeypatch.setattr(peers.Peer, "_begin", lambda self, record: None)
        await pair.begin(4)
        given = pair.home.helping._peers[1]._given
        await until(lambda: given)

        assert pair.home.board.is_idle(1)
        assert not pair.home.helping.are_idle


async def test_a_worker_says_that_it_executes_before_it_does() -> None:
    """Otherwise a third worker would send it a batch that it must refuse."""
    async with paired() as pair:
        said: list[bool] = []

        def executes(inputs: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
            said.append(pair.home.board.is_idle(1))
            pair.helper.model.rows.append(len(inputs["x"]))
            return {"y": inputs["x"]}

        pair.helper.model.execute = executes  # type: ignore[method-assign]
        await given(pair)

        assert [False] == said


async def test_a_batch_that_was_answered_is_not_waited_for() -> None:
    """Otherwise its timeout would exclude the worker from further batches."""
    async with paired() as pair:
        calls = await given(pair)
        (batch,) = pair.home.helping._peers[1]._given.values()
        pair.release()
        await pair.answers(calls)

        assert batch.timer is not None
        assert batch.timer.cancelled()


async def test_what_a_worker_had_is_known_before_its_replacement_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although the exit of the worker itself may be noticed later."""
    async with paired() as pair:
        monkeypatch.setattr(peers.Peer, "_begin", lambda self, record: None)
        calls = await pair.begin(4)
        await until(lambda: pair.home.helping._peers[1]._given)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall((1).to_bytes(4, "little"))
            await pair.home.helping.connect(ours)
            assert Offloads(refused=1) == pair.home.totals.offloads
            pair.release()

            assert [1, 2, 3, 4, 5] == await pair.answers(calls)


async def test_a_replacement_goes_on_behind_its_numbers() -> None:
    """Otherwise its batches would look begun, because its predecessor's with those numbers were."""
    async with paired() as pair:
        pair.home.board.begin(1, 0, 41)
        replaced = peers.Peer(pair.home.helping, 1)

        assert 41 == replaced._last


async def test_a_batch_that_fails_at_another_worker_is_executed_again_one_by_one() -> None:
    """The owner executes the requests singly; the faulty one fails with its own error."""
    async with paired() as pair:

        def refuses(inputs: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
            pair.helper.model.rows.append(0)
            raise InvalidRequest("expected less, got more")

        pair.helper.model.execute = refuses  # type: ignore[method-assign]
        calls = await given(pair)
        execute = pair.home.model.execute

        def refuses_one(inputs: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
            if inputs["x"][0, 0] == calls[2].inputs["x"][0, 0]:
                raise InvalidRequest("expected less, got more")
            return execute(inputs, **more)

        pair.home.model.execute = refuses_one  # type: ignore[method-assign]
        pair.release()
        with pytest.raises(InvalidRequest, match="expected less, got more"):
            await calls[2].answered()
        others = [call for call in calls if call is not calls[2]]

        assert [call.inputs["x"][0, 0] + 1 for call in others] == await pair.answers(others)
        assert (4, 1) == (pair.home.totals.success.count, pair.home.totals.fail.count)


async def test_a_worker_that_says_nothing_is_given_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be stopped: its batch fails once the execution timeout is reached."""
    monkeypatch.setattr(peers, "_WAIT_SECONDS", 0.01)
    settings = replace(SETTINGS, execution_seconds=0.05)
    async with paired(settings=settings) as pair:
        calls = await given(pair)
        for call in calls[1:]:
            with pytest.raises(EngineLost):
                await call.answered()

        assert not pair.home.helping.are_idle


async def test_large_tensors_pass_through_the_slab() -> None:
    """In both directions; slab memory and ledger reservations are released afterwards."""
    async with paired(WIDE) as pair:
        calls = await given(pair)
        held = pair.home.ledger.held
        pair.release()

        assert [1, 2, 3, 4, 5] == await pair.answers(calls)
        assert held == 4 * 4 * WIDE
        assert Offloads(1, 2 * held) == pair.home.totals.offloads
        del calls
        await until(lambda: not pair.home.ledger.held and not pair.helper.ledger.held)


async def test_batches_of_more_bytes_stay_at_home() -> None:
    """Copying them would block the event loop."""
    settings = replace(SETTINGS, offload_shared_bytes=1 << 20)
    async with paired(WIDE, settings=settings) as pair:
        calls = await pair.begin(4)
        pair.release()
        await pair.answers(calls)

        assert Offloads() == pair.home.totals.offloads


async def test_batches_that_are_quick_stay_at_home() -> None:
    """Asking another worker takes longer."""
    async with paired(settings=replace(SETTINGS, offload_seconds=1.5)) as pair:
        calls = await pair.begin(4)
        pair.release()
        await pair.answers(calls)

        assert Offloads() == pair.home.totals.offloads


async def test_requests_that_are_cancelled_do_not_keep_the_helper() -> None:
    """It executes them without answering, and is then idle again."""
    async with paired() as pair:
        calls = await given(pair)
        for call in calls[1:]:
            call.cancel("its client is gone")
        pair.release()

        assert [1] == await pair.answers(calls[:1])
        await until(lambda: pair.home.helping.are_idle)
        assert 4 == pair.home.totals.fail.count


async def test_a_worker_that_drains_takes_nothing_more() -> None:
    """A batch that it has begun continues."""
    async with paired() as pair:
        calls = await given(pair)
        pair.helper.helping._is_serving = False
        pair.release()
        await pair.answers(calls)

        assert not pair.helper.helping.is_idle
        assert not pair.home.helping.are_idle
