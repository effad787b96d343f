"""Work stealing: idle workers on CPUs execute batches of busy ones."""

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from xlaserve.concurrency.host import HostThreads
from xlaserve.net.ledger import Kind as Purpose
from xlaserve.net.ledger import Ledger
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.serving.infer_call import Ended, InferCall
from xlaserve.serving.stations.host import HostWork
from xlaserve.serving.stations.station import Served
from xlaserve.settings import Settings
from xlaserve.workers.fronts.bridge import Bridge, offer, offered
from xlaserve.workers.handing import HandedConnections, readable
from xlaserve.workers.offload.board import WorkerBoard
from xlaserve.workers.offload.offers import Offer, Offers
from xlaserve.workers.offload.peer import Peer

_LOOK_SECONDS = 0.02
"""Seconds between two looks at how busy this worker is."""
_MOST_BUSY = 0.5
"""Part of a core that its event loop takes, from which on it has no time for others."""
_PART_OF_SLAB = 8
"""The part of the memory that two workers share which the inputs of one batch may take."""
_NUMBER = struct.Struct("<I")

_log = structlog.get_logger("offload")


class Offloading:
    """Gives batches to workers that are idle, and executes theirs (the Helpers of the stations).

    It says on the board whether it is idle: no thread executes, and the event loop has time.
    """

    def __init__(
        self,
        worker: int,
        board: WorkerBoard,
        settings: Settings,
        ledger: Ledger,
        *,
        threads: HostThreads,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        is_started: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_started` tells whether models that are loaded at the start are there."""
        self.worker = worker
        self.board = board
        self.execution_seconds = settings.execution_seconds
        self.least_seconds = settings.offload_seconds
        self.most_bytes = settings.offload_shared_bytes // _PART_OF_SLAB
        self.now_ns = now_ns
        self._is_started = is_started
        self._shared_bytes = settings.offload_shared_bytes
        self._ledger = ledger
        self._threads = threads
        self._offers = Offers()
        self._peers: dict[int, Peer] = {}
        """Those that are connected by their number; the one that was given a batch last is last."""
        self._opening: set[asyncio.Task[None]] = set()
        self.silent: frozenset[int] = frozenset()
        """Workers that give no sign of life."""
        self._executing = 0
        """Batches of others that are executed here."""
        self._busy = 1.0
        """The part of a core that the event loop took of late."""
        self._is_serving = False
        self._said_idle = False

    # --- for the stations ---

    @property
    def are_idle(self) -> bool:
        """Tell whether another worker would execute a batch."""
        return any(peer.is_idle for peer in self._peers.values())

    def serve(self, instance: Served, model: LoadedModel, work: HostWork) -> None:
        """Execute batches of others for an instance from now on, until it leaves."""
        self._offers.add(instance, Offer(model, work))

    def execute(
        self,
        instance: Served,
        requests: Sequence[InferCall],
        ended: Ended,
        refused: Callable[[], None],
    ) -> bool:
        """Offload a batch to the longest idle worker; false if none is idle."""
        identity = self._offers.identity(instance)
        peer = next((peer for peer in self._peers.values() if peer.is_idle), None)
        if peer is None or not identity:
            return False
        self._peers[peer.worker] = self._peers.pop(peer.worker)
        peer.give(identity, requests, ended, refused)
        return True

    # --- for the peers ---

    @property
    def is_idle(self) -> bool:
        """Tell whether this worker executes a batch of another one now."""
        return (
            self._is_serving
            and self._is_started()
            and not self._executing
            and self._busy < _MOST_BUSY
            and self._threads.is_idle
        )

    def find(self, model: str, identity: bytes) -> Offer | None:
        """Return what executes the batches of an instance that was made of the same."""
        return self._offers.find(model, identity)

    def began(self) -> None:
        """Report this worker as busy."""
        self._executing += 1
        self._say()

    def finished(self) -> None:
        """Say whether it is idle again."""
        self._executing -= 1
        self._say()

    def left(self, peer: Peer) -> None:
        """Give a worker that is gone nothing more."""
        if self._peers.get(peer.worker) is peer:
            del self._peers[peer.worker]

    def know_silent(self, silent: frozenset[int]) -> None:
        """Give nothing to workers that give no sign of life, and take back what they had not begun.

        It is executed here.
        """
        self.silent = silent
        for peer in list(self._peers.values()):
            if peer.worker in silent:
                peer.withdraw()

    def _say(self) -> None:
        is_idle = self.is_idle
        if is_idle != self._said_idle:
            self._said_idle = is_idle
            self.board.say_idle(self.worker, is_idle)

    # --- its life ---

    async def run(self, source: HandedConnections) -> None:
        """Take the connections to other workers, and execute their batches, until cancelled.

        What has begun by then goes on to its end.
        """
        self._is_serving = True
        watching = asyncio.ensure_future(self._watch())
        try:
            while True:
                with suppress(ConnectionAbortedError):
                    self._open(await source.next())
        except EOFError:
            return  # the parent is gone, and this process is about to end
        finally:
            watching.cancel()
            self._is_serving = False
            self._say()

    async def _watch(self) -> None:
        """Say whether this worker is idle, whenever that may have changed."""
        clock = asyncio.get_running_loop().time
        while True:
            took, began = time.thread_time(), clock()
            await asyncio.sleep(_LOOK_SECONDS)
            self._busy = (time.thread_time() - took) / max(clock() - began, 1e-9)
            self._say()

    def _open(self, end: socket.socket) -> None:
        opening = asyncio.ensure_future(self.connect(end))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def connect(self, end: socket.socket) -> None:
        """Exchange batches with the worker at the other end, once both have said who they are."""
        end.setblocking(False)
        try:
            end.sendall(_NUMBER.pack(self.worker))
            worker = await _number(end)
            # One of the two makes the memory of both.
            own = self.worker < worker
            slabs = offer(end, self._shared_bytes) if own else await offered(end)
        except (EOFError, OSError) as error:
            _log.warning("worker ended before it connected", reason=str(error))
            end.close()
            return
        if (before := self._peers.get(worker)) is not None:
            # Its predecessor is gone. The board still has that one's batches, until this one
            # writes to it.
            before.bridge.close()
        peer = self._peers[worker] = Peer(self, worker)
        account = self._ledger.open()
        peer.bridge = Bridge(
            slabs, account, Purpose.REQUESTS, peer.heard, peer.lost, unsaid=peer.unsaid
        )
        await peer.bridge.open(end)


async def _number(end: socket.socket) -> int:
    """Return the number that the other end says first; raises EOFError where that has ended."""
    await readable(end)
    data = end.recv(_NUMBER.size)
    if len(data) < _NUMBER.size:
        raise EOFError
    (number,) = _NUMBER.unpack(data)
    return int(number)
