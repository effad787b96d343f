"""Workers load a model concurrently if the load can be undone."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xlaserve.concurrency.control_plane import OF_LOADS, OF_MODELS, ChangeKind, ChangeText
from xlaserve.workers.control import Control
from xlaserve.workers.messages import Ask, Did, Do, Done, Failure, GiveUp, Go, Noted, Settled
from xlaserve.workers.worker_process import WorkerGone, WorkerProcess

ROUNDS = 100
"""Loop iterations: more than any change takes between two messages."""
MADE, FAILED, DIED = "made", "failed", "died"


@dataclass(eq=False)
class Fake:
    """A worker that records its messages, and completes a change when the test says so."""

    number: int
    has_it: bool = False
    told: list[Any] = field(default_factory=list)
    making: "dict[tuple[str, int], asyncio.Future[Any]]" = field(default_factory=dict)
    makes_changes: bool = True
    failure: str = ""
    is_front_end: bool = False

    @property
    def role(self) -> SimpleNamespace:
        return SimpleNamespace(worker=self.number)

    def makes(self, kind: ChangeKind) -> bool:
        return not self.is_front_end

    def kill(self) -> None:
        self.told.append("killed")

    def tell(self, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, GiveUp):
            self.end(FAILED, message.number)

    async def expect(self, message: Any, key: tuple[str, int]) -> Any:
        self.told.append(message)
        if key[0] == "noted":
            return Noted(key[1], self.has_it)
        if isinstance(message, Do) and message.change.kind in (ChangeKind.UNLOAD, ChangeKind.EVICT):
            return Did(key[1])
        made = self.making[key] = asyncio.get_running_loop().create_future()
        return await made

    def end(self, how: str, number: int | None = None) -> None:
        """Complete its current change."""
        for (kind, of), future in list(self.making.items()):
            if number not in (None, of) or future.done():
                continue
            failure = Failure("LoadFailed", f"of {self.number}") if how == FAILED else None
            if how == DIED:
                future.set_exception(WorkerGone("it died"))
            else:
                made = Done if kind == "done" else Did
                future.set_result(made(of, failure, self.has_it))

    @property
    def has_begun(self) -> bool:
        return any(
            isinstance(one, Go) or (isinstance(one, Do) and one.change.kind in OF_LOADS)
            for one in self.told
        )

    @property
    def undone(self) -> bool:
        return any(isinstance(one, Do) and one.change.kind not in OF_LOADS for one in self.told)


@dataclass
class Change:
    """A change that a worker has asked for."""

    control: Control
    workers: Sequence[Fake]
    task: "asyncio.Task[None]"

    @classmethod
    def begin(
        cls, kind: ChangeKind, workers: Sequence[Fake], *, is_limited: bool = False
    ) -> "Change":
        """Have the first worker ask."""
        asked = cast("Callable[[], Sequence[WorkerProcess]]", lambda: workers)
        control = Control(asked, Path("/nowhere"))
        ask = Ask(0, ChangeText(kind, "m", {"models": ["m"]}), is_limited)
        origin = cast("WorkerProcess", workers[0])
        return cls(control, workers, asyncio.ensure_future(control.change(origin, ask)))

    async def goes_on(self) -> None:
        """Run the loop until it waits for a worker."""
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    @property
    def failure(self) -> str:
        (settled,) = [one for one in self.workers[0].told if isinstance(one, Settled)]
        return "" if settled.failure is None else settled.failure.text

    async def is_remembered(self) -> bool:
        """Tell whether a worker that starts later has to repeat it."""
        later = Fake(9)
        replaying = asyncio.ensure_future(self.control.replay(cast("WorkerProcess", later)))
        await self.goes_on()
        later.end(MADE)
        await replaying
        return bool(later.told)


@pytest.mark.parametrize("is_limited", [False, True], ids=["sees all", "is limited"])
@pytest.mark.parametrize("has_it", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", sorted(OF_MODELS - {ChangeKind.PURGE}))
async def test_what_can_be_taken_back_begins_everywhere(
    kind: ChangeKind, has_it: tuple[bool, bool], is_limited: bool
) -> None:
    """Reloads, unloads, and changes that depend on the caller begin in the first worker only."""
    workers = [Fake(number, has) for number, has in enumerate(has_it)]
    change = Change.begin(kind, workers, is_limited=is_limited)
    await change.goes_on()
    begun = [worker.has_begun or worker.undone for worker in workers]
    for worker in (*workers, *workers):
        worker.end(MADE)
        await change.goes_on()
    await change.task

    is_together = kind in OF_LOADS and not any(has_it) and not is_limited
    assert [True, is_together] == begun
    assert "" == change.failure


@pytest.mark.parametrize(
    ("asked", "other", "remembered", "undone", "failure"),
    [
        (MADE, MADE, True, [False, False], ""),
        (MADE, FAILED, False, [True, False], "of 1"),
        (MADE, DIED, True, [False, False], ""),
        (FAILED, MADE, False, [False, True], "of 0"),
        (FAILED, FAILED, False, [False, False], "of 0"),
        (FAILED, DIED, False, [False, False], "of 0"),
        (DIED, MADE, True, [False, False], ""),
        (DIED, FAILED, False, [False, False], "of 1"),
        (DIED, DIED, False, [False, False], "the load of 'm' was cancelled"),
    ],
)
@pytest.mark.parametrize("is_asked_first", [True, False])
async def test_all_have_it_or_none(
    asked: str, other: str, remembered: bool, undone: list[bool], failure: str, is_asked_first: bool
) -> None:
    """Whatever the outcome of each of two, and in either order."""
    workers = [Fake(0), Fake(1)]
    change = Change.begin(ChangeKind.LOAD, workers)
    await change.goes_on()
    ends = [(workers[0], asked), (workers[1], other)]
    for worker, how in ends if is_asked_first else ends[::-1]:
        worker.end(how)
    await change.goes_on()
    # A change that wrongly began only now ends too.
    workers[1].end(other)
    await change.task

    assert (failure, remembered) == (change.failure, await change.is_remembered())
    assert undone == [worker.undone for worker in workers]


@pytest.mark.parametrize(
    ("has_engine", "error"), [(False, "EngineGone"), (True, "EngineLost")], ids=["absent", "dies"]
)
async def test_a_load_that_an_engine_dies_of_is_not_to_be_sent_again(
    has_engine: bool, error: str
) -> None:
    """A mesh and clients retry UNAVAILABLE, which is right only if nothing had begun."""
    engines = [Fake(1)] if has_engine else []
    change = Change.begin(ChangeKind.LOAD, [Fake(0, is_front_end=True), *engines])
    await change.goes_on()
    for engine in engines:
        engine.end(DIED)
    await change.task
    (settled,) = [one for one in change.workers[0].told if isinstance(one, Settled)]

    assert settled.failure is not None
    assert error == settled.failure.error


async def test_where_it_fails_for_the_client_the_others_give_up() -> None:
    workers = [Fake(0), Fake(1), Fake(2)]
    change = Change.begin(ChangeKind.LOAD, workers)
    await change.goes_on()
    workers[1].end(MADE)
    workers[0].end(FAILED)
    await change.goes_on()
    given_up = [any(isinstance(one, GiveUp) for one in worker.told) for worker in workers]
    for worker in workers:
        worker.end(MADE)
    await change.task

    assert [False, False, True] == given_up
    assert [False, True, False] == [worker.undone for worker in workers]
    assert "of 0" == change.failure


async def test_a_client_that_leaves_ends_it_everywhere() -> None:
    workers = [Fake(0), Fake(1), Fake(2)]
    change = Change.begin(ChangeKind.LOAD, workers)
    await change.goes_on()
    change.control.give_up(cast("WorkerProcess", workers[0]), 0)
    # The asked worker cancels its own load by itself.
    workers[0].end(FAILED)
    await change.goes_on()
    given_up = [any(isinstance(one, GiveUp) for one in worker.told) for worker in workers]
    for worker in workers:
        worker.end(MADE)
    await change.task

    assert [False, True, True] == given_up
    assert not await change.is_remembered()


@pytest.mark.parametrize("kind", sorted(OF_LOADS))
async def test_a_load_that_is_given_up_in_the_same_read_is_made_nowhere(kind: ChangeKind) -> None:
    """Its task has not begun by then."""
    workers = [Fake(0), Fake(1)]
    change = Change.begin(kind, workers)
    change.control.give_up(cast("WorkerProcess", workers[0]), 0)
    await change.goes_on()
    begun = [worker.has_begun for worker in workers]
    for worker in workers:
        worker.end(MADE)
    await change.task

    assert [False, False] == begun
    assert "the load of 'm' was cancelled" == change.failure
