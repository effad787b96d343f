"""The queue of models whose requests are handed over one by one."""

import asyncio

import pytest

from xlaserve.errors import Overloaded
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.infer_call import AwaitedInfer, InferCall
from xlaserve.serving.stations.direct import ByPrincipal, DirectQueue


class Copies:
    """Accepts up to `room` calls."""

    def __init__(self, room: int, group: int = 4) -> None:
        self.room = room
        self.group = group
        self.handed: list[list[InferCall]] = []

    def hand(self, calls: list[InferCall]) -> None:
        assert calls
        assert len(calls) <= self.room
        self.room -= len(calls)
        self.handed.append(calls)


def waiting(queue: DirectQueue) -> int:
    return len(list(queue.pending_since()))


async def test_those_of_one_pass_of_the_loop_are_handed_on_in_groups_at_its_end() -> None:
    copies = Copies(room=6)
    queue = DirectQueue(copies, 100, lambda: 1)
    calls = [AwaitedInfer() for _ in range(9)]
    for call in calls:
        queue.submit(call)

    assert [] == copies.handed
    await asyncio.sleep(0)
    assert [calls[:4], calls[4:6]] == copies.handed
    assert 3 == waiting(queue)
    copies.room = 2
    queue.hand_on()
    assert calls[6:8] == copies.handed[-1]


async def test_a_call_that_ends_leaves_the_queue() -> None:
    copies = Copies(room=0)
    queue = DirectQueue(copies, 100, lambda: 1)
    calls = [AwaitedInfer() for _ in range(3)]
    for call in calls:
        queue.submit(call)
    calls[1].cancel()
    queue.leave(AwaitedInfer())

    assert 2 == waiting(queue)
    assert [calls[0], calls[2]] == queue.retire()
    assert 0 == waiting(queue)


async def test_what_waits_is_bounded() -> None:
    queue = DirectQueue(Copies(room=0), 2, lambda: 1)
    for _ in range(2):
        queue.submit(AwaitedInfer())

    with pytest.raises(Overloaded, match="max_requests_per_model"):
        queue.submit(AwaitedInfer())


async def test_a_call_does_not_pass_those_that_wait() -> None:
    copies = Copies(room=0)
    queue = DirectQueue(copies, 100, lambda: 1)
    first, second = AwaitedInfer(), AwaitedInfer()
    queue.submit(first)
    copies.room = 2
    queue.submit(second)
    await asyncio.sleep(0)

    assert [[first, second]] == copies.handed


async def test_nobody_is_refused_while_the_copies_have_room() -> None:
    copies = Copies(room=3)
    queue = DirectQueue(copies, 2, lambda: 1)
    for _ in range(5):
        queue.submit(AwaitedInfer())

    assert ([2, 1], 2) == ([len(calls) for calls in copies.handed], waiting(queue))
    with pytest.raises(Overloaded):
        queue.submit(AwaitedInfer())


async def test_principals_have_their_turns_whoever_came_first() -> None:
    """A principal with many requests delays only itself."""
    copies = Copies(room=0)
    queue = DirectQueue(copies, 100, lambda: 1, ByPrincipal())
    calls = [AwaitedInfer() for _ in range(8)]
    for call, name in zip(calls, ("a", "a", "a", "a", "b", "b", "", "c"), strict=True):
        call.principal = Principal(name) if name else None
        queue.submit(call)
    calls[7].cancel()
    copies.room = 8
    queue.hand_on()
    a, b, nobody = calls[:4], calls[4:6], calls[6]

    assert [a[0], b[0], nobody, a[1], b[1], a[2], a[3]] == [one for h in copies.handed for one in h]
    assert [] == queue.retire()
    with pytest.raises(ValueError, match="not in deque"):
        ByPrincipal().remove(nobody)
