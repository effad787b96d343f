"""Isolation of clients whose requests cause batches to fail."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from xlaserve import errors
from xlaserve.errors.code import ProcessAbsent, ProcessLost
from xlaserve.errors.sequence import StatesLost
from xlaserve.serving.infer_call import Executed, InferCall

APART_SECONDS = 10
"""Duration of the isolation after a failure."""

MOST_APART = 256
"""Maximum number of isolated clients per model; the oldest is dropped."""

OTHERS_FIRST = 3
"""Batches of other clients executed between two isolated requests, so that isolated clients get at
most a quarter of a model's executions.
"""

_SECOND_NS = 1_000_000_000

_NOT_REPEATED = (
    errors.DeviceUnavailable,
    errors.EngineGone,
    errors.EngineLost,
    errors.ExecutionStalled,
    errors.ModelNotReady,
    errors.Overloaded,
    errors.ProcessSilent,
    errors.ShuttingDown,
    ProcessAbsent,
    ProcessLost,
    StatesLost,
)
"""Failures of the process or the device, not of a request in the batch. A retry could fail other
replicas too.
"""

_MARK = "apart"
"""Tag in the batching key of an isolated request, next to its client."""


def may_be_repeated(error: Exception) -> bool:
    """Tell whether the requests of a failed batch may be retried one by one."""
    return not isinstance(error, _NOT_REPEATED)


class FailedBatch:
    """A failed batch whose requests are retried one by one."""

    __slots__ = ("error", "failed", "requests")

    def __init__(self, requests: Sequence[InferCall], error: Exception) -> None:
        self.requests = requests
        self.error = error
        """The error of the batch."""
        self.failed: list[InferCall] = []
        """Requests that failed again when retried and have not been judged."""


class Apart:
    """Isolated clients of a model: their requests failed again when retried, others did not.

    For `APART_SECONDS` their requests are batched only with requests of the same client, and run
    once per `OTHERS_FIRST` batches of others. Otherwise one client could cause a retry of every
    request of every batch. Belongs to the event loop.
    """

    def __init__(self, waiting: Callable[[], Iterable[InferCall]]) -> None:
        """`waiting` returns the queued requests, to mark requests of a newly isolated client."""
        self._waiting = waiting
        self._until: OrderedDict[int | str, int] = OrderedDict()
        self._owed = 0
        """Batches of other clients due before the next isolated request."""

    def __len__(self) -> int:
        return len(self._until)

    @property
    def is_owed(self) -> bool:
        """Tell whether batches of other clients are due before the next isolated request."""
        return self._owed > 0

    def mark(self, request: InferCall, now_ns: int) -> None:
        """Isolate a request if its client is isolated."""
        until = self._until
        while until and next(iter(until.values())) <= now_ns:
            until.popitem(last=False)
        client = client_of(request)
        if client in until and not request.is_apart:
            request.is_apart = True
            request.key = (*request.key, (_MARK, client))

    def began(self, request: InferCall) -> None:
        """Record that a batch begins, given its first request."""
        self._owed = OTHERS_FIRST if request.is_apart else max(0, self._owed - 1)

    def repeated(
        self,
        request: InferCall,
        batch: FailedBatch,
        result: Executed | BaseException,
        now_ns: int,
    ) -> None:
        """Record the outcome of a retried request."""
        if isinstance(result, Exception) and may_be_repeated(result):
            batch.failed.append(request)
        self.judge(batch, now_ns)

    def judge(self, batch: FailedBatch, now_ns: int) -> None:
        """Isolate the clients of requests that failed again, if another one succeeded.

        If all of them fail, the model itself is at fault.
        """
        if batch.failed and any(one.executed is not None for one in batch.requests):
            for request in batch.failed:
                self.add(request, now_ns)
            batch.failed.clear()

    def add(self, request: InferCall, now_ns: int) -> None:
        """Isolate the client of a request, including its queued requests."""
        client = client_of(request)
        is_new = client not in self._until
        self._until[client] = now_ns + APART_SECONDS * _SECOND_NS
        self._until.move_to_end(client)
        if len(self._until) > MOST_APART:
            self._until.popitem(last=False)
        if is_new:  # requests of a known client were marked on arrival
            for one in self._waiting():
                self.mark(one, now_ns)


def client_of(call: InferCall) -> int | str:
    """Return the identity of a call's client: its principal, or its connection.

    Behind a trusted proxy it is the client's address, because the proxy's connections are shared.
    """
    peer = call.peer
    return call.owner or call.client or (peer.proxy and peer.address) or id(peer.account)
