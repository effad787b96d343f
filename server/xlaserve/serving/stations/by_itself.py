"""Executes calls without batching, in host threads or on a device."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from xlaserve.concurrency.completion import Cancellable
from xlaserve.runtime.loaded import Executable, LoadedModel
from xlaserve.serving.answers import deliver
from xlaserve.serving.infer_call import Ended, Executed, InferCall
from xlaserve.serving.stations.on_demand import Missing, ShapeCompiler, executable_for
from xlaserve.serving.stations.station import Served, Working


class Work(Protocol):
    """Executes calls outside the event loop."""

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued executions."""
        ...

    def start(self, executable: Executable, call: InferCall, ended: Ended) -> Cancellable:
        """Execute one call on the least busy replica."""
        ...


class ByItself:
    """Executes each call alone; compiles its shape first if necessary (a Station)."""

    def __init__(
        self,
        instance: Served,
        model: LoadedModel,
        work: Work,
        shapes: ShapeCompiler,
        now_ns: Callable[[], int],
    ) -> None:
        self._instance = instance
        self._model = model
        self.work = work
        self._shapes = shapes
        self._now_ns = now_ns

    def pending_since(self) -> Iterator[int]:
        """Yield the submission times of queued executions."""
        return self.work.pending_since()

    def begin(self, call: InferCall) -> None:
        """Execute a call; raises InvalidTensor if its dimensions contradict each other."""
        call.submitted_ns = call.submitted_ns or self._now_ns()
        found = executable_for(self._model, call.inputs)
        if isinstance(found, Missing):
            self._compile_first(call, found)
        else:
            self._run(call, found)

    def retire(self) -> Sequence[InferCall]:
        """Return nothing: calls are queued in the threads, which continue with them."""
        return ()

    def run(self, call: InferCall, over: Callable[[], None], ended: Ended) -> None:
        """Execute a dequeued call; `over` is called when another may start."""

        def completed(result: Executed | BaseException) -> None:
            over()
            ended(result)

        found = executable_for(self._model, call.inputs)
        if isinstance(found, Missing):
            self._compile_first(call, found, completed)
        else:
            self._run(call, found, completed)

    def _run(self, call: InferCall, executable: Executable, ended: Ended | None = None) -> None:
        ended = ended or partial(deliver, [call])
        call.wait_at(Working(self.work.start(executable, call, ended)))

    def _compile_first(self, call: InferCall, missing: Missing, ended: Ended | None = None) -> None:
        compiling = asyncio.ensure_future(self._shapes.compiled(self._instance, missing))
        # Keep the instance open even if the call is cancelled: its execution may just be starting.
        self._instance.acquire()
        call.wait_at(Working(compiling))
        compiling.add_done_callback(
            partial(self._compiled, call, ended or partial(deliver, [call]))
        )

    def _compiled(
        self, call: InferCall, ended: Ended, compiling: "asyncio.Task[Executable]"
    ) -> None:
        try:
            executable = compiling.result()
            if call.has_ended:
                ended(asyncio.CancelledError())
            else:
                self._run(call, executable, ended)
        except BaseException as error:  # the call must end in any case
            ended(error)
        finally:
            self._instance.release()


class AloneRunner:
    """Executes queued calls one by one, up to `lanes` at a time (a Runner).

    Calls wait in the queue and not in the threads, so that the queue's policies apply.
    """

    is_inline = False

    def __init__(self, station: ByItself, lanes: int) -> None:
        self._station = station
        self.lanes = lanes

    def run(self, requests: Sequence[InferCall], freed: Callable[[], None], ended: Ended) -> None:
        """Execute one call; `freed` and `ended` are called on completion."""
        (call,) = requests
        self._station.run(call, freed, ended)
