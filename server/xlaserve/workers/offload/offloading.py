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

_POLL_SECONDS = 0.02
"""Interval for measuring how busy the event loop is, in seconds."""
_MOST_BUSY = 0.5
"""Fraction of a core above which a busy event loop makes the worker count as not idle."""
_PART_OF_SLAB = 8
"""The inputs of one batch may take up to 1/8 of the memory shared by two workers."""
_NUMBER = struct.Struct("<I")

_log = structlog.get_logger("offload")


class Offloading:
    """Sends batches to idle workers, and executes theirs (the Helpers of the stations).

    Publishes on the board whether this worker is idle: no thread executes, and the event loop is
    not busy.
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
        """`is_started` tells whether the initial models have been loaded."""
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
        """Connected peers by number, least recently used first."""
        self._opening: set[asyncio.Task[None]] = set()
        self.silent: frozenset[int] = frozenset()
        """Numbers of unresponsive workers."""
        self._executing = 0
        """Number of other workers' batches being executed here."""
        self._busy = 1.0
        """Recent CPU use of the event loop's thread, as a fraction of a core."""
        self._is_serving = False
        self._said_idle = False

    # --- Called by stations ---

    @property
    def are_idle(self) -> bool:
        """Tell whether another worker would execute a batch."""
        return any(peer.is_idle for peer in self._peers.values())

    def serve(self, instance: Served, model: LoadedModel, work: HostWork) -> None:
        """Offer an instance to other workers until it is unloaded."""
        self._offers.add(instance, Offer(model, work))

    def execute(
        self,
        instance: Served,
        requests: Sequence[InferCall],
        ended: Ended,
        refused: Callable[[], None],
    ) -> bool:
        """Send a batch to the least recently used idle worker.

        Returns False if no worker is idle, or if the instance cannot be described to others.
        """
        identity = self._offers.identity(instance)
        peer = next((peer for peer in self._peers.values() if peer.is_idle), None)
        if peer is None or not identity:
            return False
        self._peers[peer.worker] = self._peers.pop(peer.worker)
        peer.give(identity, requests, ended, refused)
        return True

    # --- Called by peers ---

    @property
    def is_idle(self) -> bool:
        """Tell whether this worker would execute a batch of another worker now."""
        return (
            self._is_serving
            and self._is_started()
            and not self._executing
            and self._busy < _MOST_BUSY
            and self._threads.is_idle
        )

    def find(self, model: str, identity: bytes) -> Offer | None:
        """Return the offer of an instance with the given identity."""
        return self._offers.find(model, identity)

    def began(self) -> None:
        """Count a batch of another worker as begun, and update the board."""
        self._executing += 1
        self._say()

    def finished(self) -> None:
        """Count a batch of another worker as ended, and update the board."""
        self._executing -= 1
        self._say()

    def left(self, peer: Peer) -> None:
        """Remove a worker whose process has ended."""
        if self._peers.get(peer.worker) is peer:
            del self._peers[peer.worker]

    def know_silent(self, silent: frozenset[int]) -> None:
        """Stop using unresponsive workers, and take back batches that they have not begun.

        Those are executed here instead.
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

    # --- Lifecycle ---

    async def run(self, source: HandedConnections) -> None:
        """Accept connections to other workers and exchange batches, until cancelled.

        Batches already begun are executed to the end.
        """
        self._is_serving = True
        watching = asyncio.ensure_future(self._watch())
        try:
            while True:
                with suppress(ConnectionAbortedError):
                    self._open(await source.next())
        except EOFError:
            return  # the parent is gone, and this process will exit
        finally:
            watching.cancel()
            self._is_serving = False
            self._say()

    async def _watch(self) -> None:
        """Keep the board up to date about whether this worker is idle."""
        clock = asyncio.get_running_loop().time
        while True:
            took, began = time.thread_time(), clock()
            await asyncio.sleep(_POLL_SECONDS)
            self._busy = (time.thread_time() - took) / max(clock() - began, 1e-9)
            self._say()

    def _open(self, end: socket.socket) -> None:
        opening = asyncio.ensure_future(self.connect(end))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def connect(self, end: socket.socket) -> None:
        """Exchange numbers with the worker at the other end, then batches."""
        end.setblocking(False)
        try:
            end.sendall(_NUMBER.pack(self.worker))
            worker = await _number(end)
            # The worker with the lower number allocates the memory of both.
            own = self.worker < worker
            slabs = offer(end, self._shared_bytes) if own else await offered(end)
        except (EOFError, OSError) as error:
            _log.warning("worker ended before it connected", reason=str(error))
            end.close()
            return
        if (before := self._peers.get(worker)) is not None:
            # The previous process with this number is gone. Its row on the board stays valid until
            # the new process writes to it.
            before.bridge.close()
        peer = self._peers[worker] = Peer(self, worker)
        account = self._ledger.open()
        peer.bridge = Bridge(
            slabs, account, Purpose.REQUESTS, peer.heard, peer.lost, unsaid=peer.unsaid
        )
        await peer.bridge.open(end)


async def _number(end: socket.socket) -> int:
    """Receive the peer's number; raises EOFError if the peer has exited."""
    await readable(end)
    data = end.recv(_NUMBER.size)
    if len(data) < _NUMBER.size:
        raise EOFError
    (number,) = _NUMBER.unpack(data)
    return int(number)
