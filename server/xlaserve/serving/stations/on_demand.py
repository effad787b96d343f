"""Shapes compiled when a request first asks for them, without blocking others."""

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
    """A shape that has to be compiled before its execution."""

    shapes: OnDemand
    shape: Hashable


def look(model: LoadedModel, inputs: Mapping[str, Value]) -> Executable | Missing:
    """Return the executable for these inputs: the model, or its program compiled on demand.

    Raises InvalidTensor for sizes that contradict one another.
    """
    shapes = model.on_demand
    shape = None if shapes is None else shapes.shape_of(inputs)
    if shapes is None or shape is None:
        return model
    return shapes.find(shape) or Missing(shapes, shape)


class ShapeCompiler:
    """Compiles missing shapes; concurrent requests for a shape share one compilation."""

    def __init__(self, workers: Workers, seconds: float) -> None:
        self._seconds = seconds
        """Longest time of a compilation."""
        self._workers = workers
        # Do not start what has been cancelled meanwhile.
        self._flights = SingleFlight[Executable](abandonable=True)
        self._log = structlog.get_logger("execution")

    async def compiled(self, instance: Served, missing: Missing) -> Executable:
        """Return the program of a model for a shape; compiling may take seconds.

        Raises what `OnDemand.compile` raises.
        """
        compile_it = partial(self._compile, instance, missing.shapes, missing.shape)
        return await self._flights.run((instance, missing.shape), compile_it)

    async def _compile(self, instance: Served, shapes: OnDemand, shape: Hashable) -> Executable:
        self._workers.abandoned.check_limit(instance.model)
        if instance.is_stuck:
            raise CompilationTimedOut(instance.model, shape, self._seconds)
        running = self._workers.compile(partial(shapes.compile, shape))
        # The thread is a user of its own: it may outlive those who waited for it.
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
    """A thread that compiles for an instance: its use ends once."""

    def __init__(self, instance: Served) -> None:
        self._instance: Served | None = instance
        instance.acquire()

    def ended(self) -> None:
        """Count one user less, and the compiled shape."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.correct()
            instance.release()
