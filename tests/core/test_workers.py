"""The threads that compute: what they tell, and what they let go of."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.accelerators import until

from xlaserve.core.batching import Executed
from xlaserve.core.host_runner import in_thread
from xlaserve.core.workers import DeviceThreads, Workers


class Lingering(ThreadPoolExecutor):
    """A thread that has told of its end and is kept from ending, as by others that compute."""

    def __init__(self) -> None:
        super().__init__(1)
        self.may_end = threading.Event()

    # As Executor has it, whose parameters have no names.
    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run a call, and hold what it returned for as long as the thread lingers."""
        told: Future[Any] = Future()

        def run() -> None:
            result = call(*args, **kwargs)
            told.set_result(result)
            self.may_end.wait()

        super().submit(run)
        return told


class User:
    """An instance of a model, as far as threads know one."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...


class Outputs:
    """What a model computed, and whether anybody still has it."""

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[np.ndarray[Any, Any]]] = []
        self.heard: list[type[object]] = []

    def compute(self) -> Executed:
        """Make an array that nobody else has."""
        array = np.zeros(4)
        self._arrays.append(weakref.ref(array))
        return Executed({"y": array}, 0, 0)

    def hear(self, result: object) -> None:
        """Be told of it, and keep nothing."""
        self.heard.append(type(result))

    @property
    def held(self) -> list[bool]:
        """Tell for each whether it is still there."""
        return [array() is not None for array in self._arrays]


@pytest.fixture
def lingering() -> Iterator[Lingering]:
    thread = Lingering()
    gc.disable()
    yield thread
    gc.enable()
    thread.may_end.set()
    thread.shutdown()


async def test_a_thread_of_the_host_holds_nothing_of_what_it_gave(lingering: Lingering) -> None:
    """An unload may be answered by then, and the memory has to be free."""
    workers, outputs = Workers(load_threads=1, execute_threads=1), Outputs()
    workers._execute = lingering
    in_thread(workers, User(), outputs.compute, outputs.hear)
    await until(lambda: outputs.heard != [])

    assert [Executed] == outputs.heard
    assert [False] == outputs.held


async def test_a_thread_of_a_device_holds_nothing_of_what_it_gave(lingering: Lingering) -> None:
    threads, outputs = DeviceThreads("cuda:0"), Outputs()
    threads._fetch = lingering
    threads.start(lambda: outputs.compute, lambda: None, outputs.hear)
    await until(lambda: outputs.heard != [])

    assert [Executed] == outputs.heard
    assert [False] == outputs.held
