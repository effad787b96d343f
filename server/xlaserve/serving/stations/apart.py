"""Isolation of clients whose requests failed batches of others."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from xlaserve import errors
from xlaserve.errors.code import ProcessAbsent, ProcessLost
from xlaserve.errors.sequence import StatesLost
from xlaserve.serving.infer_call import Executed, InferCall

APART_SECONDS = 10
"""Seconds of isolation after a failure."""

MOST_APART = 256
"""Limit of isolated clients per model; the oldest is forgotten."""

OTHERS_FIRST = 3
"""Batches of others that go before the next request that is executed apart, while they wait: at
most a quarter of the executions of a model are for clients that fail the batches of others."""

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
"""Failures of the process or the device, which do not depend on a request of the batch. A retry
could fail other replicas too."""

_MARK = "apart"
"""Part of an isolated request's batching key, next to its client."""


def may_be_repeated(error: Exception) -> bool:
    """Tell whether requests of a failed batch may be retried, each by itself."""
    return not isinstance(error, _NOT_REPEATED)


class FailedBatch:
    """A failed batch, whose requests are retried one by one."""

    __slots__ = ("error", "failed", "requests")

    def __init__(self, requests: Sequence[InferCall], error: Exception) -> None:
        self.requests = requests
        self.error = error
        """The batch's error."""
        self.failed: list[InferCall] = []
        """Requests that failed by themselves too, and were not judged yet."""


class Apart:
    """The clients of one model whose requests failed alone, and others of their batch did not.

    For `APART_SECONDS` their requests are put together with no others than their own, and go once
    for `OTHERS_FIRST` batches of others: a batch that fails is executed once more for each of its
    requests, which one client could otherwise have done all the time. Of the event loop.
    """

    def __init__(self, waiting: Callable[[], Iterable[InferCall]]) -> None:
        """`waiting` returns the requests that wait, which may be of a client that is isolated."""
        self._waiting = waiting
        self._until: OrderedDict[int | str, int] = OrderedDict()
        self._owed = 0
        """Batches of other clients due before the next isolated request."""

    def __len__(self) -> int:
        return len(self._until)

    @property
    def is_owed(self) -> bool:
        """Tell whether other clients go before the next isolated request."""
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
        """Record the first request of a batch that begins."""
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
        """Set those apart that failed by themselves, once another request of the batch did not.

        Where all of them fail it is the model that does.
        """
        if batch.failed and any(one.executed is not None for one in batch.requests):
            for request in batch.failed:
                self.add(request, now_ns)
            batch.failed.clear()

    def add(self, request: InferCall, now_ns: int) -> None:
        """Isolate the client of a request from now on, with those of its requests that wait."""
        client = client_of(request)
        is_new = client not in self._until
        self._until[client] = now_ns + APART_SECONDS * _SECOND_NS
        self._until.move_to_end(client)
        if len(self._until) > MOST_APART:
            self._until.popitem(last=False)
        if is_new:  # else they were marked as they came
            for one in self._waiting():
                self.mark(one, now_ns)


def client_of(call: InferCall) -> int | str:
    """Return what is the same of the calls of one client: its principal, or its connection.

    Of the clients of a trusted proxy it is the address: connections of a proxy are everybody's.
    """
    peer = call.peer
    return call.owner or call.client or (peer.proxy and peer.address) or id(peer.account)
