"""On-demand compilation of input shapes, without blocking other requests."""

import asyncio
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

import structlog

from xlaserve.concurrency.limited import Overdue
from xlaserve.concurrency.sharing import SingleFlight
from xlaserve.concurrency.workers import Workers
from xlaserve.errors import CompilationTimedOut, OutOfMappings
from xlaserve.runtime.loaded import Executable, LoadedModel, OnDemand, Value
from xlaserve.serving.stations.station import Served


@dataclass(frozen=True, slots=True)
class Missing:
    """A shape that must be compiled before it can be executed."""

    shapes: OnDemand
    shape: Hashable


def executable_for(model: LoadedModel, inputs: Mapping[str, Value]) -> Executable | Missing:
    """Return the executable for these inputs: the model, or its program compiled for their shape.

    Returns `Missing` if that must be compiled. Raises InvalidTensor if dimensions contradict each
    other.
    """
    shapes = model.on_demand
    shape = None if shapes is None else shapes.shape_of(inputs)
    if shapes is None or shape is None:
        return model
    return shapes.find(shape) or Missing(shapes, shape)


class ShapeCompiler:
    """Compiles missing shapes; concurrent requests for one shape share a compilation."""

    def __init__(self, workers: Workers, seconds: float) -> None:
        self._seconds = seconds
        """Time limit of a compilation."""
        self._workers = workers
        # Do not start a compilation that nobody waits for.
        self._flights = SingleFlight[Executable](abandonable=True)
        self._log = structlog.get_logger("execution")

    async def compiled(self, instance: Served, missing: Missing) -> Executable:
        """Return the model's program for a shape; compiling may take seconds.

        Raises the errors of `OnDemand.compile`.
        """
        compile_it = partial(self._compile, instance, missing.shapes, missing.shape)
        return await self._flights.run((instance, missing.shape), compile_it)

    async def _compile(self, instance: Served, shapes: OnDemand, shape: Hashable) -> Executable:
        self._workers.abandoned.check_limit(instance.model)
        if instance.is_stuck:
            raise CompilationTimedOut(instance.model, shape, self._seconds)
        running = self._workers.compile(partial(shapes.compile, shape))
        # The thread keeps the instance open, since it may outlive the waiting requests.
        using = _User(instance)
        running.whenever(using.ended)
        try:
            compiled = await running.within(self._seconds)
        except Overdue:
            work = instance.abandon(running, f"compiling shape {shape}")
            self._workers.abandoned.add(running, work, lambda: None)
            using.ended()
            raise CompilationTimedOut(instance.model, shape, self._seconds) from None
        except OutOfMappings as error:
            self._log.warning("shape not compiled", model=instance.model, reason=str(error))
            raise
        except asyncio.CancelledError:
            running.cancel()
            raise
        self._log.info("shape compiled", model=instance.model, shape=shape)
        return compiled


class _User:
    """A compiling thread as a user of its instance, released exactly once."""

    def __init__(self, instance: Served) -> None:
        self._instance: Served | None = instance
        instance.acquire()

    def ended(self) -> None:
        """Release the instance, and account for the memory of the compiled program."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.correct()
            instance.release()
