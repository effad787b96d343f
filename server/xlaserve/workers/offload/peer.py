"""Exchanges batches with a peer worker over a bridge."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog

from xlaserve.errors import EngineLost, ExecutionStalled
from xlaserve.errors.panics import ENDS
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.infer_call import Ended, Executed, InferCall, Tensors
from xlaserve.serving.stations.batching import pack
from xlaserve.serving.stations.host import executed
from xlaserve.serving.statistics import Offloads
from xlaserve.tensors import TensorSpec
from xlaserve.workers.failures import error_of, failure_of
from xlaserve.workers.fronts.bridge import Bridge
from xlaserve.workers.fronts.records import NOWHERE, Kind, Record, bytes_of, tensors_of
from xlaserve.workers.messages import Failure
from xlaserve.workers.offload.board import WorkerBoard
from xlaserve.workers.offload.offers import Offer

_WAIT_SECONDS = 5.0
"""Time in addition to `execution_seconds` for a peer to report on a batch. The peer itself reports
an execution that does not end."""

_ENDS = (Kind.ANSWER, Kind.FAILURE, Kind.REFUSED)
"""Records that end a batch."""

_log = structlog.get_logger("offload")


class Home(Protocol):
    """This worker, as its peers see it."""

    worker: int
    board: WorkerBoard
    silent: frozenset[int]
    """Numbers of unresponsive workers."""
    execution_seconds: float
    """Time limit of an execution; 0 for no limit."""

    @property
    def is_idle(self) -> bool:
        """Tell whether this worker would execute a batch of another worker now."""
        ...

    def find(self, model: str, identity: bytes) -> Offer | None:
        """Return the offer of an instance with the given identity."""
        ...

    def began(self) -> None:
        """Count a batch of another worker as begun."""
        ...

    def finished(self) -> None:
        """Count a batch of another worker as ended."""
        ...

    def now_ns(self) -> int:
        """Return the current time of the engine's clock."""
        ...

    def left(self, peer: "Peer") -> None:
        """Remove a peer whose process has ended."""
        ...


@dataclass(slots=True, eq=False)
class _Given:
    """A batch that was sent to the peer."""

    requests: Sequence[InferCall]
    ended: Ended
    refused: Callable[[], None]
    bytes: int
    """Size of the batch's inputs."""
    timer: asyncio.TimerHandle | None = None

    @property
    def info(self) -> ModelInfo:
        """Return the description of the model."""
        return self.requests[0].instance.info

    def count(self, offloads: Offloads) -> None:
        """Add to the version's statistics, and stop the timer."""
        if self.timer is not None:
            self.timer.cancel()
        self.requests[0].found.statistics.offloads += offloads


class Peer:
    """Sends batches to one other worker, and executes that worker's batches. Event loop only."""

    def __init__(self, home: Home, worker: int) -> None:
        self.worker = worker
        """Number of the worker at the other end."""
        self.bridge: Bridge
        self._home = home
        self._given: dict[int, _Given] = {}
        self._withdrawn: set[int] = set()
        """Batches that were sent to the peer, but are executed here after all."""
        # Continue numbering after the last batch that the peer began for a predecessor of this
        # worker.
        self._last = home.board.begun(worker, home.worker)

    @property
    def is_idle(self) -> bool:
        """Tell whether the peer is idle and has no batch of this worker."""
        if self._given or self._withdrawn or self.worker in self._home.silent:
            return False
        return self._home.board.is_idle(self.worker)

    # --- Batches of this worker ---

    def give(
        self,
        identity: bytes,
        requests: Sequence[InferCall],
        ended: Ended,
        refused: Callable[[], None],
    ) -> None:
        """Send a batch to the peer."""
        rows = sum([request.rows for request in requests])
        inputs = requests[0].instance.info.inputs
        place, flat, size = self._placed(inputs, pack(requests, rows))
        self._last = number = self._last + 1
        given = self._given[number] = _Given(requests, ended, refused, size)
        if self._home.execution_seconds:
            seconds = self._home.execution_seconds + _WAIT_SECONDS
            loop = asyncio.get_running_loop()
            given.timer = loop.call_later(seconds, self._expire, requests[0].model)
        model = requests[0].instance.model
        self.bridge.say((Kind.BATCH, number, model, identity, place, flat))

    def _expire(self, model: str) -> None:
        _log.error(
            "worker did not report a batch result",
            peer=self.worker,
            model=model,
            consequence="it gets no more batches",
        )
        self.bridge.close()

    def withdraw(self) -> None:
        """Take back the batches that the peer has not begun, and execute them here."""
        begun = self._home.board.begun(self.worker, self._home.worker)
        for number in [number for number in self._given if number > begun]:
            self._withdrawn.add(number)
            one = self._given.pop(number)
            one.count(Offloads(refused=1))
            one.refused()

    # --- Records ---

    def heard(self, records: Sequence[Record]) -> None:
        """Process records from the peer."""
        for record in records:
            if record[0] in _ENDS and record[1] in self._withdrawn:
                self._drop(record)
                continue
            match record[0]:
                case Kind.BATCH:
                    self._begin(record)
                case Kind.ANSWER:
                    self._answered(record)
                case Kind.FAILURE:
                    number, kind, text, facts = record[1:]
                    given = self._given.pop(number)
                    given.count(Offloads(1, given.bytes))
                    given.ended(error_of(Failure(kind, text, facts)))
                case Kind.REFUSED:
                    given = self._given.pop(record[1])
                    given.count(Offloads(refused=1))
                    given.refused()
                case Kind.DROPPED:
                    self.bridge.dropped(record[1])
                case _:
                    raise LookupError(f"unexpected record of kind {record[0]}")

    def _drop(self, record: Record) -> None:
        """Release the slab block of an abandoned response."""
        self._withdrawn.discard(record[1])
        if record[0] == Kind.ANSWER and record[2] >= 0 and self.bridge.reader is not None:
            self.bridge.reader.view(record[2], 0)
            self.bridge.watch_drops()

    def _answered(self, record: Record) -> None:
        _, number, place, flat, begun_ns, ended_ns = record
        given = self._given.pop(number)
        outputs = tensors_of(given.info.outputs, flat, place, self.bridge.reader)
        data = flat[2::3]
        size = sum(map(len, data)) if place == NOWHERE else sum(data)
        if place >= 0:
            self.bridge.watch_drops()
        given.count(Offloads(1, given.bytes + size))
        given.ended(Executed(outputs, begun_ns, ended_ns))

    def lost(self) -> None:
        """Fail the batches that the peer had begun, and execute the others in this worker."""
        given, self._given = self._given, {}
        begun = self._home.board.begun(self.worker, self._home.worker)
        self._home.left(self)
        for number, one in given.items():
            if number <= begun:
                # The batch may have crashed the worker, so it must not be retried.
                one.count(Offloads(lost=1))
                one.ended(EngineLost(one.requests[0].model, f"worker {self.worker}"))
            else:
                one.count(Offloads(refused=1))
                one.refused()

    # --- Batches of the peer ---

    def _begin(self, record: Record) -> None:
        _, number, model, identity, place, flat = record
        offer = self._home.find(model, identity) if self._home.is_idle else None
        if offer is None:
            self._refuse(number, place)
            return
        inputs = tensors_of(offer.model.info.inputs, flat, place, self.bridge.reader)
        if place >= 0:
            self.bridge.watch_drops()
        self._home.board.begin(self._home.worker, self.worker, number)
        self._home.began()
        now_ns = self._home.now_ns

        def run(replica: int) -> Executed | BaseException:
            return executed(now_ns, partial(offer.model.execute, inputs, replica=replica))

        try:
            offer.work.watch.check()
            offer.work.in_thread(run, partial(self._executed, number, offer.model.info))
        except (RuntimeError, ExecutionStalled):
            self._home.finished()
            self._refuse(number, NOWHERE)

    def _refuse(self, number: int, place: int) -> None:
        if place >= 0 and self.bridge.reader is not None:
            self.bridge.reader.view(place, 0)
            self.bridge.watch_drops()
        self.bridge.say((Kind.REFUSED, number))

    def _executed(self, number: int, info: ModelInfo, result: Executed | BaseException) -> None:
        self._home.finished()
        if isinstance(result, BaseException):
            self.bridge.say((Kind.FAILURE, number, *failure_of(result).fields))
            return
        try:
            place, flat, _ = self._placed(info.outputs, result.outputs)
        except ENDS:
            raise
        except BaseException as error:
            self.bridge.say((Kind.FAILURE, number, *failure_of(error).fields))
            return
        self.bridge.say((Kind.ANSWER, number, place, flat, result.begun_ns, result.ended_ns))

    def unsaid(self, record: Record, error: BaseException) -> Record | None:
        """Replace a record that cannot be serialized: execute a batch here, or send a failure."""
        if record[0] == Kind.BATCH:
            given = self._given.pop(record[1])
            given.count(Offloads(refused=1))
            given.refused()
            return None
        return Kind.FAILURE, record[1], *failure_of(error).fields

    def _placed(self, specs: Sequence[TensorSpec], tensors: Tensors) -> tuple[int, list[Any], int]:
        """Return tensors in record form, their slab offset, and their total size."""
        positions = {spec.name: at for at, spec in enumerate(specs)}
        flat: list[Any] = []
        total = 0
        for name, tensor in tensors.items():
            at = positions[name]
            data = bytes_of(specs[at].datatype, tensor)
            total += len(data)
            flat += (at, tensor.shape, data)
        place = self.bridge.place(flat[2::3], total)
        if place >= 0:
            flat[2::3] = map(len, flat[2::3])
        return place, flat, total
