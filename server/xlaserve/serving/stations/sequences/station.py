"""Assembly of the station of a sequence model."""

import asyncio
from dataclasses import dataclass

from xlaserve.concurrency.workers import Workers
from xlaserve.runtime.sequential import SequentialModel
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.stations.batching import (
    Batcher,
    BatchPolicy,
    BatchQueue,
    Clock,
    RequestQueue,
    Runner,
)
from xlaserve.serving.stations.dispatch import Dispatcher
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.outbox import Outbox
from xlaserve.serving.stations.sequences.endings import Endings
from xlaserve.serving.stations.sequences.sequences import Sequences
from xlaserve.serving.stations.sequences.slot_queue import SlotQueue
from xlaserve.serving.stations.sequences.steps import CopySteps, DeviceSteps, HostSteps
from xlaserve.serving.stations.sequences.table import SequenceTable
from xlaserve.serving.stations.station import Served
from xlaserve.serving.stations.unending import Unending

_MICROSECOND_NS = 1000


@dataclass(frozen=True, slots=True)
class SequenceParts:
    """Components of a sequence model's station."""

    instance: Served
    model: SequentialModel
    work: HostWork
    workers: Workers
    clock: Clock
    is_gathered: bool
    """Whether several sequences share a batch."""
    processes: int = 1
    """Number of server processes."""

    def station(self) -> Sequences:
        """Build the station, with a batcher for each replica."""
        model = self.model
        idle_ns = model.batching.idle_microseconds * _MICROSECOND_NS
        table = SequenceTable(
            self.instance.model, model.replicas, model.slots, idle_ns, processes=self.processes
        )
        outbox = Outbox(asyncio.get_running_loop())

        def batcher(station: Sequences, replica: int) -> Batcher:
            return Batcher(
                self._queue(),
                self._runner(station, outbox, replica),
                self.clock,
                lambda calls, result: station.delivered(replica, calls, result),
            )

        may_go_on = model.handling is not None and model.handling.is_decoupled
        return Sequences(
            model,
            table,
            self.clock,
            batcher,
            on_expired=Endings(self.instance, model, outbox).tell,
            unending=Unending(self.instance) if may_go_on else None,
        )

    def _queue(self) -> RequestQueue:
        """Create the queue of a replica."""
        model, batching = self.model, self.model.batching
        policy = BatchPolicy(
            # The queue cannot exceed this: each sequence with a slot has one turn at a time.
            max_requests=model.slots,
            preferred_rows=batching.preferred_batch_size,
            delay_ns=batching.max_queue_delay_microseconds * _MICROSECOND_NS,
        )
        # Python models get requests one by one and have no batch rows.
        has_rows = model.batch_limit > (model.handling is not None)
        if batching.is_direct and has_rows and self.is_gathered:
            return SlotQueue(policy, model.slots, batching.minimum_slot_utilization)
        most = (lambda: model.batch_limit or 1) if self.is_gathered else (lambda: 1)
        return BatchQueue(self.instance.model, policy, most)

    def _runner(self, station: Sequences, outbox: Outbox, replica: int) -> Runner:
        """Create the runner of a replica."""
        instance, model, now_ns = self.instance, self.model, self.clock.now_ns
        if model.handling is not None:

            def settle(call: InferCall, *, has_failed: bool) -> None:
                # `station` is a weak proxy; its bound method would be a strong reference.
                station.settle(call, has_failed=has_failed)

            def again(call: InferCall) -> None:
                station.again(call)

            return CopySteps(
                instance, model, outbox, replica, now_ns=now_ns, settle=settle, again=again
            )
        if model.dispatching is None:
            return HostSteps(model, self.work, replica, now_ns)
        device = self.workers.device(model.dispatching.queues[replica])
        dispatcher = Dispatcher(instance, [device], now_ns, watch=self.work.watch)
        return DeviceSteps(model, dispatcher, replica)
