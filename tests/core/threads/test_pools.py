"""Compute threads: what they report, and which references they drop."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from support.accelerators import until

from xlaserve.concurrency.device import DeviceThreads
from xlaserve.concurrency.host import HostJob, HostThreads
from xlaserve.serving.infer_call import Executed
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.station import Served


class Lingering(ThreadPoolExecutor):
    """A thread that has reported completion but is kept from finishing, as by other threads."""

    def __init__(self) -> None:
        super().__init__(1)
        self.may_end = threading.Event()

    # The signature of Executor, whose parameters are positional-only.
    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run a call, and keep its result for as long as the thread lingers."""
        told: Future[Any] = Future()

        def run() -> None:
            result = call(*args, **kwargs)
            told.set_result(result)
            self.may_end.wait()

        super().submit(run)
        return told


class Outputs:
    """The output of a model, with a weak reference that tells whether anybody holds it."""

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[np.ndarray[Any, Any]]] = []
        self.heard: list[type[object]] = []

    def compute(self) -> Executed:
        """Make an array to which nobody else has a reference."""
        array = np.zeros(4)
        self._arrays.append(weakref.ref(array))
        return Executed({"y": array}, 0, 0)

    def hear(self, result: object) -> None:
        """Receive a result without keeping it."""
        self.heard.append(type(result))

    @property
    def held(self) -> list[bool]:
        """Tell for each output whether it is still referenced."""
        return [array() is not None for array in self._arrays]


class Program:
    """A program that a thread executes once the test permits."""

    def __init__(self) -> None:
        self.may_begin = threading.Event()

    def execute(self) -> None:
        """Return nothing."""
        self.may_begin.wait()


@pytest.fixture
def lingering(no_collection: None) -> Iterator[Lingering]:
    thread = Lingering()
    yield thread
    thread.may_end.set()
    thread.shutdown()


@pytest.mark.usefixtures("no_collection")
async def test_a_thread_of_the_host_holds_nothing_of_what_it_gave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The unload may be answered by then, and the memory must be free."""
    threads, outputs, may_end = HostThreads(1), Outputs(), threading.Event()
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon_threadsafe

    def told(call: Callable[..., object], *args: Any) -> asyncio.Handle:
        handle = call_soon(call, *args)
        may_end.wait()
        return handle

    monkeypatch.setattr(loop, "call_soon_threadsafe", told)
    threads.start(outputs.compute, outputs.hear)
    await until(lambda: outputs.heard != [])
    held = outputs.held
    may_end.set()
    threads.close()

    assert [Executed] == outputs.heard
    assert [False] == held


@pytest.mark.usefixtures("no_collection")
async def test_a_thread_of_the_host_holds_nothing_of_what_it_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the program nor the model that the completion refers to may outlive its unload."""
    threads, program, may_end, heard = HostThreads(1), Program(), threading.Event(), list[object]()

    def ended(result: object, program: object = program) -> None:
        heard.append(result)

    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon_threadsafe

    def told(call: Callable[..., object], *args: Any) -> asyncio.Handle:
        handle = call_soon(call, *args)
        may_end.wait()
        return handle

    monkeypatch.setattr(loop, "call_soon_threadsafe", told)
    threads.start(program.execute, ended)
    left = weakref.ref(program)
    program.may_begin.set()
    del program, ended
    await until(lambda: heard != [])
    held = left() is not None
    may_end.set()
    threads.close()

    assert [None] == heard
    assert not held


@pytest.mark.usefixtures("no_collection")
async def test_what_is_over_leaves_no_garbage() -> None:
    """Inputs can be large, and a reference cycle keeps them until the next collection."""

    class Input:
        pass

    threads, given, heard = HostThreads(1), Input(), list[object]()
    job = threads.start(partial(id, given), heard.append)
    held = weakref.ref(given)
    del given
    await until(lambda: heard != [])
    threads.close()

    assert held() is None
    assert not job.cancel()
    assert not job.waits


class Instance:
    """A model instance that counts its users."""

    model = "m"
    users = 0

    def acquire(self) -> None:
        self.users += 1

    def release(self) -> None:
        self.users -= 1


@pytest.mark.usefixtures("no_collection")
async def test_work_that_is_over_leaves_no_garbage() -> None:
    """A job whose call still references it holds nothing either."""

    class Input:
        pass

    threads, given, instance, heard = HostThreads(1), Input(), Instance(), list[object]()
    held = weakref.ref(given)
    work = HostWork(cast(Served, instance), threads, 1, lambda: 0)
    jobs: list[HostJob] = []

    def ended(result: object, given: object = given) -> None:
        heard.append(jobs.pop())

    jobs.append(work.in_thread(lambda replica: None, ended))
    del given, ended
    await until(lambda: heard != [])
    heard.clear()
    threads.close()

    assert held() is None
    assert (0, []) == (instance.users, list(work.pending_since()))


async def test_a_thread_of_a_device_holds_nothing_of_what_it_gave(lingering: Lingering) -> None:
    threads, outputs = DeviceThreads("cuda:0"), Outputs()
    threads._fetch = lingering
    threads.start(lambda: outputs.compute, lambda: None, outputs.hear)
    await until(lambda: outputs.heard != [])

    assert [Executed] == outputs.heard
    assert [False] == outputs.held


async def test_a_thread_of_a_device_holds_nothing_of_what_it_called(lingering: Lingering) -> None:
    threads, program, heard = DeviceThreads("cuda:0"), Program(), list[object]()
    threads._fetch = lingering
    wait_for_it = program.execute
    left = weakref.ref(program)
    program.may_begin.set()

    def ended(result: object, program: object = program) -> None:
        heard.append(result)

    threads.start([wait_for_it].pop, lambda: None, ended)
    del program, wait_for_it, ended
    await until(lambda: heard != [])

    assert [None] == heard
    assert left() is None


# # --- the queue of the host threads -------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[HostThreads]:
    one = HostThreads(1)
    yield one
    one.close()


async def test_jobs_end_in_their_order(threads: HostThreads) -> None:
    heard: list[object] = []
    jobs = [threads.start(partial(int, number), heard.append) for number in range(9)]
    await until(lambda: len(heard) == len(jobs))

    assert list(range(9)) == heard
    assert not any(job.waits for job in jobs)


def idle(threads: HostThreads) -> None:
    """Block, without running the event loop, until a thread is idle."""
    while not threads._idle:
        time.sleep(0.001)


async def test_threads_do_not_run_ahead_of_a_busy_event_loop(threads: HostThreads) -> None:
    """Otherwise completed outputs that wait for the loop would be unbounded."""
    heard, begun = list[object](), list[int]()
    for number in range(9):
        threads.start(partial(begun.append, number), heard.append)
    idle(threads)
    ahead = list(begun)
    await until(lambda: len(heard) == 9)

    assert [0, 1] == ahead
    assert list(range(9)) == begun


@pytest.mark.parametrize("number", [1, 4], ids=["given", "waiting"])
async def test_a_job_that_did_not_begin_is_called_off(threads: HostThreads, number: int) -> None:
    heard, begun, go_on = list[object](), list[int](), threading.Event()
    threads.start(go_on.wait, heard.append)
    jobs = [threads.start(partial(begun.append, index), heard.append) for index in range(1, 6)]
    called_off = jobs[number - 1].cancel()
    heard_at_once = list(heard)
    go_on.set()
    await until(lambda: len(heard) == 6)

    assert called_off
    assert [] == heard_at_once
    assert [one for one in range(1, 6) if one != number] == begun
    assert 1 == sum(isinstance(found, asyncio.CancelledError) for found in heard)


async def test_a_job_that_began_goes_on(threads: HostThreads) -> None:
    heard, begun, go_on = list[object](), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go_on.wait()
        return "done"

    job = threads.start(work, heard.append)
    begun.wait()
    called_off, waits = job.cancel(), job.waits
    go_on.set()
    await until(lambda: heard != [])

    assert (False, False) == (called_off, waits)
    assert ["done"] == heard


async def test_whoever_waits_as_the_threads_end_is_told() -> None:
    threads, heard, go_on = HostThreads(1), list[object](), threading.Event()
    threads.start(go_on.wait, heard.append)
    for _ in range(5):
        threads.start(int, heard.append)
    go_on.set()
    threads.close()
    await until(lambda: len(heard) == 6)

    assert 6 == len(heard)
    assert set(map(type, heard)) <= {bool, int, asyncio.CancelledError}
    with pytest.raises(RuntimeError, match="shutdown"):
        threads.start(int, heard.append)


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_more_threads")
async def test_whoever_gets_no_thread_is_told(threads: HostThreads) -> None:
    heard: list[object] = []
    with pytest.raises(RuntimeError, match="new thread"):
        threads.start(int, heard.append)
    await asyncio.sleep(0)

    assert [] == heard
    assert {} == threads._waiting


async def test_where_there_is_no_second_thread_the_first_does_it_all(
    request: pytest.FixtureRequest,
) -> None:
    threads, heard, go_on = HostThreads(2, 1), list[object](), threading.Event()
    threads.start(go_on.wait, heard.append)
    request.getfixturevalue("no_more_threads")
    for model in ("a", "b"):
        threads.start(int, heard.append, model)
    go_on.set()
    await until(lambda: len(heard) == 3)
    threads.close()

    assert [True, 0, 0] == heard


# --- fairness ----------------------------------------------------------------------------------


class Slow:
    """Executions of one model that block until released."""

    def __init__(self, threads: HostThreads, model: str) -> None:
        self._threads = threads
        self._model = model
        self.may_end = threading.Event()
        self.begun: list[int] = []
        self.heard: list[object] = []

    def start(self, count: int) -> list[HostJob]:
        """Submit this many executions."""
        start = partial(self._threads.start, self._compute, self.heard.append, self._model)
        return [start() for _ in range(count)]

    def _compute(self) -> None:
        self.begun.append(1)
        self.may_end.wait()


@pytest.fixture
def shared() -> Iterator[HostThreads]:
    one = HostThreads(2, 2)
    yield one
    one.close()


async def test_a_slow_model_does_not_hold_another(shared: HostThreads) -> None:
    """Though it fills every thread that it may use, with more requests queued."""
    slow, heard = Slow(shared, "slow"), list[object]()
    slow.start(9)
    await until(lambda: len(slow.begun) == 2)
    for number in range(9):
        shared.start(partial(int, number), heard.append, "quick")
    await until(lambda: len(heard) == 9)
    begun = len(slow.begun)
    slow.may_end.set()
    await until(lambda: len(slow.heard) == 9)

    assert list(range(9)) == heard
    assert 2 == begun


async def test_as_many_slow_models_as_there_are_spare_threads_hold_no_other(
    shared: HostThreads,
) -> None:
    first, second, heard = Slow(shared, "first"), Slow(shared, "second"), list[object]()
    first.start(9)
    await until(lambda: len(first.begun) == 2)
    second.start(9)
    await until(lambda: len(second.begun) == 1)
    shared.start(int, heard.append, "quick")
    await until(lambda: heard != [])
    begun = [len(first.begun), len(second.begun)]
    for slow in (first, second):
        slow.may_end.set()
    await until(lambda: len(first.heard) + len(second.heard) == 18)

    assert [0] == heard
    assert [2, 1] == begun


async def test_cancelled_work_of_a_slow_model_holds_nothing(shared: HostThreads) -> None:
    """Running executions continue for nobody, queued ones are dropped, and other models run."""
    slow, heard = Slow(shared, "slow"), list[object]()
    jobs = slow.start(9)
    await until(lambda: len(slow.begun) == 2)
    cancelled = [job.cancel() for job in jobs]
    await until(lambda: len(slow.heard) == 7)
    shared.start(int, heard.append, "quick")
    await until(lambda: heard != [])
    slow.may_end.set()
    await until(lambda: len(slow.heard) == 9)

    assert [False] * 2 + [True] * 7 == cancelled
    assert 2 == len(slow.begun)
    assert not shared._waiting


async def test_models_have_their_turns_one_after_the_other(threads: HostThreads) -> None:
    """A model with many requests does not delay another until all of them are done."""
    gate, begun, heard = Slow(threads, "gate"), list[str](), list[object]()
    gate.start(1)
    for model in ("a", "a", "a", "b", "a", "b"):
        threads.start(partial(begun.append, model), heard.append, model)
    gate.may_end.set()
    await until(lambda: len(heard) == 6)

    assert ["a", "b", "a", "b", "a", "a"] == begun


async def test_a_thread_that_does_not_end_is_not_waited_for(shared: HostThreads) -> None:
    slow = Slow(shared, "slow")
    slow.start(1)
    await until(lambda: slow.begun != [])
    at_first = shared.close(0)
    slow.may_end.set()

    assert not at_first
    assert shared.close()
    assert all(thread.daemon for thread in shared._started)


async def test_a_call_is_waited_for(threads: HostThreads) -> None:
    found = await threads.run(partial(int, "7"))
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)

    assert 7 == found


async def test_a_call_that_nobody_waits_for_is_not_begun(threads: HostThreads) -> None:
    begun, go_on = list[int](), threading.Event()
    first = asyncio.ensure_future(threads.run(go_on.wait))
    calls = [asyncio.ensure_future(threads.run(partial(begun.append, n))) for n in range(4)]
    await asyncio.sleep(0)
    calls[3].cancel()
    await asyncio.wait([calls[3]])
    go_on.set()
    await asyncio.gather(first, *calls[:3])

    assert [0, 1, 2] == begun


async def test_no_more_threads_are_started_than_have_work() -> None:
    """A burst of requests starts no spare threads, each of which would cost memory."""
    threads = HostThreads(2, spare=8)
    before = set(threading.enumerate())
    slow = Slow(threads, "slow")
    slow.start(20)
    await until(lambda: len(slow.begun) == 2)
    started = set(threading.enumerate()) - before
    slow.may_end.set()
    await until(lambda: len(slow.heard) == 20)
    ended = threads.close(60)

    assert 2 == len(started)
    assert ended
