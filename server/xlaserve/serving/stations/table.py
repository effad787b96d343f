"""Station kinds and wrappers, and the choice between them for a loaded instance."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import cast

import structlog

from xlaserve.artifact.target_sizes import IN_FLIGHT
from xlaserve.concurrency.workers import Workers
from xlaserve.model_config.config import DynamicBatching
from xlaserve.runtime.handling import Handling, Slotted
from xlaserve.runtime.loaded import Generating, LoadedModel, ModelInfo
from xlaserve.runtime.sequential import Sequential, SequentialModel
from xlaserve.runtime.wrappers.ragged import Ragged
from xlaserve.serving.answers import Counting, deliver
from xlaserve.serving.call import Observer
from xlaserve.serving.ensemble import EnsemblePlan
from xlaserve.serving.response_cache import ResponseCache
from xlaserve.serving.stations.batches import Batches, LoopClock
from xlaserve.serving.stations.batching import Batcher, Fit, Runner, fitting
from xlaserve.serving.stations.by_itself import AloneRunner, ByItself
from xlaserve.serving.stations.caching import Caching
from xlaserve.serving.stations.deadlock import Waits
from xlaserve.serving.stations.direct import ByPrincipal, DirectQueue
from xlaserve.serving.stations.dispatch import DeviceRunner, Dispatcher
from xlaserve.serving.stations.ensemble import Ensemble, Steps
from xlaserve.serving.stations.generator import Generator, GeneratorRunner
from xlaserve.serving.stations.handled import CopiesRunner, Handed
from xlaserve.serving.stations.health import DEFAULT_EXECUTION_SECONDS, Health
from xlaserve.serving.stations.host import HostRunner, HostWork, Inline, InlineLimit
from xlaserve.serving.stations.offloading import Helpers, OffloadingRunner
from xlaserve.serving.stations.on_demand import ShapeCompiler
from xlaserve.serving.stations.ordered import Ordered
from xlaserve.serving.stations.outbox import Outbox
from xlaserve.serving.stations.overruns import Overruns
from xlaserve.serving.stations.priorities import PriorityQueue
from xlaserve.serving.stations.queue_policy import has_policy, is_ruled, queue_for
from xlaserve.serving.stations.ragged import Gathered, RaggedRunner, ragged_fitting
from xlaserve.serving.stations.sequences.station import SequenceParts
from xlaserve.serving.stations.station import Elsewhere, Served, Station, Wrapper
from xlaserve.serving.stations.together import gathering

_WORTH_SECONDS = 4e-6
"""Cost of queueing a request; batching must save more than this per row."""

_PACK_SECONDS_PER_BYTE = 1e-10
"""Cost of copying a row into a batch; unbatched rows are read in place."""

DEFAULT_MAX_QUEUED = 1024
DEFAULT_COMPILE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class ExecutionPolicy:
    """Execution settings."""

    inline_seconds: float
    """Models that the warm-up measured as quicker than this run on the event loop."""
    max_queued: int = DEFAULT_MAX_QUEUED
    """Maximum number of queued requests for models whose configuration sets none."""
    batching: bool = True
    compile_seconds: float = DEFAULT_COMPILE_SECONDS
    """Time limit of on-demand compilations."""
    execution_seconds: float = DEFAULT_EXECUTION_SECONDS
    """Time limit of executions on threads or devices; 0 for none."""
    processes: int = 1
    """Number of server processes, shown in sequence errors."""


class Stations:
    """Builds the stations of one server."""

    def __init__(
        self,
        workers: Workers,
        policy: ExecutionPolicy,
        steps: Steps,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        *,
        cache: ResponseCache | None = None,
        counting: Observer | None = None,
    ) -> None:
        """`steps` executes ensemble steps; `counting` counts executions for other calls."""
        self.workers = workers
        self.policy = policy
        self.steps = steps
        self.now_ns = now_ns
        self.shapes = ShapeCompiler(workers, policy.compile_seconds)
        self.overruns = Overruns(now_ns)
        self.health = Health(policy.execution_seconds)
        self.cache = cache
        self.counting = counting or Counting(now_ns)
        self.waits = Waits()
        self.helpers: Helpers | None = None
        """Other workers for work stealing; None if there are none."""

    def build(self, instance: Served, before: Station | None = None) -> Station:
        """Choose and build the station of an instance.

        `before` is the station to replace; it is returned unchanged if the choice cannot have
        changed.
        """
        wrappers = list(_wrappers(before))
        inner = wrappers[-1].within if wrappers else before
        candidate = Candidate(self, instance, inner)
        kind = next(kind for kind in KINDS if kind.fits(candidate))
        if before is not None and not kind.learns:
            return before
        if before is None and not candidate.may_be_wrapped and _asks_for_order(candidate):
            structlog.get_logger("queue").warning(
                "preserve_ordering without effect",
                model=instance.model,
                reason="its requests may have any number of answers",
            )
        made = kind.make(candidate)
        if wrappers:
            wrappers[-1].renew(made)
            return wrappers[0]
        if before is None and candidate.may_be_wrapped:
            for wrapping in WRAPPINGS:
                if wrapping.fits(candidate):
                    made = wrapping.make(candidate, made)
        return made


def _wrappers(station: Station | None) -> Iterator[Wrapper]:
    """Yield the wrappers of a station, outermost first."""
    while station is not None and hasattr(station, "within"):
        wrapper = cast(Wrapper, station)
        yield wrapper
        station = wrapper.within


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that needs a station."""

    stations: Stations
    instance: Served
    before: Station | None

    @property
    def model(self) -> LoadedModel:
        """Return the loaded model; valid unless an earlier row of `KINDS` applies."""
        return cast(LoadedModel, self.instance.runner)

    @property
    def may_be_wrapped(self) -> bool:
        """Tell whether this model alone gives exactly one answer to each call."""
        runner = self.instance.runner
        if isinstance(runner, Handling):
            return not runner.is_decoupled
        return not isinstance(runner, EnsemblePlan | Generating | Elsewhere)

    @property
    def may_be_inline(self) -> bool:
        """Tell whether the model may run on the event loop if it is quick.

        Excludes models whose duration the warm-up cannot know: data-dependent loops and on-demand
        shapes.
        """
        follows = self.model.info.loops_follow_inputs or self.model.on_demand is not None
        return not follows and not self.stations.overruns.is_away(self.instance)

    @property
    def needs_queue(self) -> bool:
        """Tell whether the configuration sets priorities or a queue policy."""
        return has_policy(self.instance.config.dynamic_batching)

    @property
    def gains(self) -> bool:
        """Tell whether a row alone takes longer than its share of the largest batch.

        False for models that cannot be batched. Of the others, always True for those configured to
        wait for more requests, and for those that cannot run on the event loop: a thread costs more
        than batching.
        """
        model, policy = self.model, self.stations.policy
        most = model.batch_limit
        if not policy.batching or model.on_demand is not None or most < 2:
            return False
        wanted, alone = self.instance.config.dynamic_batching, model.expected_seconds(1)
        waits = wanted.max_queue_delay_microseconds or wanted.preferred_batch_size
        if waits or not self.may_be_inline or alone > policy.inline_seconds:
            return True
        packed = _WORTH_SECONDS + _row_bytes(model.info) * _PACK_SECONDS_PER_BYTE
        return alone > packed + model.expected_seconds(most) / most

    # --- components of stations ---

    def work(self) -> HostWork:
        """Return the instance's HostWork: that of the station it replaces, or else a new one."""
        found = getattr(self.before, "work", None)
        if isinstance(found, HostWork):
            return found
        stations = self.stations
        watch, now_ns = stations.health.watch(self.instance), stations.now_ns
        return HostWork(self.instance, stations.workers.host, self.model.replicas, now_ns, watch)

    def by_itself(self, work: HostWork | Dispatcher) -> ByItself:
        """Return a station that executes single calls."""
        stations = self.stations
        return ByItself(self.instance, self.model, work, stations.shapes, stations.now_ns)

    def dispatcher(self) -> Dispatcher:
        """Return a dispatcher to the model's devices."""
        assert self.model.dispatching is not None
        devices = [self.stations.workers.device(queue) for queue in self.model.dispatching.queues]
        watch = self.stations.health.watch(self.instance)
        return Dispatcher(self.instance, devices, self.stations.now_ns, watch=watch)

    def limit(self) -> InlineLimit:
        """Return the time limit on the event loop."""
        stations = self.stations
        return InlineLimit(stations.policy.inline_seconds, stations.overruns.overran)

    def batcher(
        self,
        runner: Runner,
        yields_to: Callable[[int], bool] | None = None,
        fit: Fit = fitting,
    ) -> Batcher:
        """Return a batcher for a runner.

        `yields_to` tells whether a request of a priority level may start without a free lane;
        offloading runners decide that themselves. `fit` selects the requests of a batch.
        """
        stations, model = self.stations, self.model
        gathers = stations.policy.batching and not isinstance(model, Generating)
        queue = queue_for(
            self.instance.model,
            self.instance.config.dynamic_batching,
            stations.policy.max_queued,
            (lambda: model.batch_limit) if gathers else (lambda: 1),
            fit,
        )
        clock = LoopClock(asyncio.get_running_loop(), stations.now_ns)
        if isinstance(runner, OffloadingRunner):
            return runner.gathered(Batcher(queue, runner, clock, deliver, runner.overtakes(queue)))
        if yields_to is None or not isinstance(queue, PriorityQueue):
            return Batcher(queue, runner, clock, deliver)
        overtakes = partial(_overtakes, queue, yields_to)
        return Batcher(queue, runner, clock, deliver, overtakes)


def _overtakes(queue: PriorityQueue, yields_to: Callable[[int], bool]) -> bool:
    return bool(len(queue)) and yields_to(queue.first_level)


def _sequences(of: Candidate) -> Station:
    stations, model = of.stations, cast(SequentialModel, of.instance.runner)
    clock = LoopClock(asyncio.get_running_loop(), stations.now_ns)
    policy, work = stations.policy, of.work()
    return SequenceParts(
        of.instance, model, work, stations.workers, clock, policy.batching, policy.processes
    ).station()


def _ensemble(of: Candidate) -> Station:
    stations, plan = of.stations, cast(EnsemblePlan, of.instance.runner)
    threads = stations.workers.host
    return Ensemble(plan, stations.steps, threads, stations.now_ns, of.instance)


def _elsewhere(of: Candidate) -> Station:
    return cast(Elsewhere, of.instance.runner).station(of.instance)


def _handed(of: Candidate) -> Station:
    model, stations = cast(Handling, of.instance.runner), of.stations
    loop = asyncio.get_running_loop()
    ruled = is_ruled(of.instance.config.dynamic_batching)
    runner = CopiesRunner(of.instance, model, Outbox(loop), stations.now_ns, is_ruled=ruled)
    # The batcher enforces queue policies, even for a model that is not batched.
    if model.is_batched or of.instance.config.dynamic_batching != DynamicBatching():
        yields_to = runner.yields_to if isinstance(model, Slotted) else None
        return Handed(of.instance, runner, of.batcher(runner, yields_to), stations.waits)
    order = ByPrincipal() if isinstance(model, Slotted) else None
    direct = DirectQueue(runner, stations.policy.max_queued, stations.now_ns, order)
    return Handed(of.instance, runner, direct, stations.waits)


def _ragged(of: Candidate) -> Station:
    model, work = cast(Ragged, of.instance.runner), of.work()
    runner = RaggedRunner(model, of.model.replicas, work, of.stations.now_ns)
    return Gathered(model, of.batcher(runner, fit=partial(ragged_fitting, model)), work)


def _generator(of: Candidate) -> Station:
    model = cast(Generating, of.instance.runner)
    stations = of.stations
    watch, now_ns = stations.health.watch(of.instance), stations.now_ns
    work = HostWork(of.instance, stations.workers.host, model.replicas, now_ns, watch)
    computing = gathering(model, work, now_ns, batching=stations.policy.batching)
    station = Generator(of.instance, model, work, now_ns, computing)
    if of.needs_queue:
        station.queue = of.batcher(GeneratorRunner(station))
    return station


def _alone_on_device(of: Candidate) -> Station:
    return _queued(of, of.by_itself(of.dispatcher()), IN_FLIGHT)


def _queued(of: Candidate, station: ByItself, in_flight: int = 1) -> Station:
    """Return a station that executes each call separately, with a queue if policies require one.

    `in_flight` is the number of concurrent executions per replica.
    """
    if not of.needs_queue:
        return station
    runner = AloneRunner(station, in_flight * of.model.replicas)
    return Batches(of.batcher(runner), station, is_ruled=True)


def _batched_on_device(of: Candidate) -> Station:
    dispatcher, dispatching = of.dispatcher(), of.model.dispatching
    assert dispatching is not None
    batcher = of.batcher(DeviceRunner(dispatcher, of.model, dispatching))
    return Batches(batcher, of.by_itself(dispatcher), is_ruled=of.needs_queue)


def _batched_on_host(of: Candidate) -> Station:
    limit, work = of.limit() if of.may_be_inline else None, of.work()
    now_ns, threads = of.stations.now_ns, of.by_itself(work)
    runner: Runner = HostRunner(of.model, work, limit, now_ns)
    if of.stations.helpers is not None:
        runner = OffloadingRunner(runner, of.instance, of.model, of.stations.helpers)
        of.stations.helpers.serve(of.instance, of.model, work)
    batcher = of.batcher(runner)
    if limit is None:
        return Batches(batcher, threads, is_ruled=of.needs_queue)
    inline = Inline(of.model, threads, work, limit, now_ns)
    return Batches(batcher, inline, inline, is_ruled=of.needs_queue)


def _inline(of: Candidate) -> Station:
    work = of.work()
    return Inline(of.model, of.by_itself(work), work, of.limit(), of.stations.now_ns)


def _in_threads(of: Candidate) -> Station:
    return _queued(of, of.by_itself(of.work()))


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of station: when it applies, and how it is built."""

    name: str
    fits: Callable[[Candidate], bool]
    make: Callable[[Candidate], Station]
    learns: bool = False
    """Whether the choice may change as the model's speed becomes better known."""


KINDS = (
    Kind("in another process", lambda of: isinstance(of.instance.runner, Elsewhere), _elsewhere),
    Kind("ensemble", lambda of: isinstance(of.instance.runner, EnsemblePlan), _ensemble),
    Kind("handed over", lambda of: isinstance(of.instance.runner, Handling), _handed),
    Kind("ragged", lambda of: isinstance(of.instance.runner, Ragged), _ragged),
    Kind("sequences", lambda of: isinstance(of.instance.runner, Sequential), _sequences),
    Kind("generator", lambda of: isinstance(of.instance.runner, Generating), _generator),
    # Devices need a queue in any case; on-demand shapes cannot be batched.
    Kind(
        "alone on a device",
        lambda of: of.model.dispatching is not None and of.model.on_demand is not None,
        _alone_on_device,
    ),
    Kind("batched on a device", lambda of: of.model.dispatching is not None, _batched_on_device),
    Kind(
        "batched on the host",
        lambda of: of.gains or (of.needs_queue and of.model.on_demand is None),
        _batched_on_host,
        learns=True,
    ),
    Kind("inline", lambda of: of.may_be_inline, _inline, learns=True),
    Kind("in threads", lambda of: True, _in_threads, learns=True),
)
"""The first kind that fits is used."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """A wrapper that may be added to a station."""

    name: str
    fits: Callable[[Candidate], bool]
    make: Callable[[Candidate, Station], Station]


def _asks_for_order(of: Candidate) -> bool:
    return of.instance.config.dynamic_batching.preserve_ordering


def _asks_for_cache(of: Candidate) -> bool:
    if not of.instance.config.response_cache:
        return False
    if of.stations.cache is None:
        structlog.get_logger("cache").warning(
            "response cache disabled",
            model=of.instance.model,
            reason="response_cache_bytes is 0",
        )
    return of.stations.cache is not None


def _caching(of: Candidate, within: Station) -> Station:
    stations, instance = of.stations, of.instance
    assert stations.cache is not None
    section = stations.cache.section()
    instance.on_leave(section.close)
    return Caching(
        within,
        section,
        instance,
        resolve=stations.steps.resolve,
        waits=stations.waits,
        threads=stations.workers.host,
        counting=stations.counting,
        now_ns=stations.now_ns,
    )


WRAPPINGS = (
    Wrapping("response cache", _asks_for_cache, _caching),
    Wrapping(
        "preserve_ordering",
        _asks_for_order,
        lambda of, within: Ordered(within, of.stations.counting, of.stations.waits),
    ),
)
"""All wrappers that fit are added, the first innermost."""


def _row_bytes(info: ModelInfo) -> int:
    """Return the bytes of one row of the inputs, counting only fixed dimensions."""
    return sum(
        spec.datatype.itemsize * prod(size for size in spec.shape[1:] if size > 0)
        for spec in info.inputs
    )
