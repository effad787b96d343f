"""A wrapper that answers calls in the order of their arrival (`preserve_ordering`)."""

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from xlaserve.serving.answers import answer_with, deliver, parameters_of
from xlaserve.serving.call import Observer
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.inference import InferResponse
from xlaserve.serving.stations.around import Around
from xlaserve.serving.stations.deadlock import Waits
from xlaserve.serving.stations.relay import Relay
from xlaserve.serving.stations.station import Station

_Result = tuple[Relay, InferResponse | BaseException]


class _Turn:
    """The position of a call in the order: an entry of a linked list."""

    __slots__ = ("call", "next", "previous", "relay")

    def __init__(self, call: InferCall, relay: Relay, previous: "_Turn | None") -> None:
        self.call = call
        self.relay = relay
        """The relay executed on the call's behalf."""
        self.previous = previous
        self.next: _Turn | None = None
        if previous is not None:
            previous.next = self

    def unlink(self) -> None:
        """Remove the entry from the list."""
        if self.previous is not None:
            self.previous.next = self.next
        if self.next is not None:
            self.next.previous = self.previous
        self.previous = self.next = None


class Ordered(Around):
    """Executes calls with the inner station; answers them in order of arrival (a Station).

    Errors count as answers. A call that was cancelled or has expired holds up no others.
    """

    def __init__(self, within: Station, counting: Observer, waits: Waits) -> None:
        super().__init__(within)
        self._counting = counting
        self._waits = waits
        self._order: OrderedDict[InferCall, _Turn] = OrderedDict()
        """Unanswered calls in arrival order, with their list entries."""
        self._results: dict[InferCall, _Result] = {}
        """Results that wait for earlier calls to be answered."""
        self._is_answering = False

    def begin(self, call: InferCall) -> None:
        """Execute a call; raises like the inner station."""
        relay = Relay(call, self._counting, partial(self._completed, call))
        last = self._order[next(reversed(self._order))] if self._order else None
        self._order[call] = _Turn(call, relay, last)
        call.wait_at(self)
        try:
            self.within.begin(relay)
        except BaseException:
            self._removed(call)
            raise
        if not call.has_ended:
            self._waits.watch(call)

    def awaited(self, call: InferCall) -> Iterator[InferCall]:
        """Yield the previous call, and this call's relay unless it has completed."""
        turn = self._order.get(call)
        if turn is None:
            return
        if turn.previous is not None:
            yield turn.previous.call
        if call not in self._results:
            yield turn.relay

    def leave(self, call: InferCall) -> None:
        """Cancel the execution of an ended call, and answer the calls that it held up."""
        relay = self._removed(call)
        self._results.pop(call, None)
        if relay is not None:
            relay.cancel("no caller is waiting for the answer")
            self._answer()

    def _removed(self, call: InferCall) -> Relay | None:
        """Remove a call from the order; return its relay."""
        turn = self._order.pop(call, None)
        if turn is None:
            return None
        turn.unlink()
        return turn.relay

    def _completed(
        self, call: InferCall, relay: Relay, result: InferResponse | BaseException
    ) -> None:
        if call in self._order:
            self._results[call] = relay, result
            self._answer()

    def _answer(self) -> None:
        """Answer completed calls from the head of the order.

        Writing an answer may cause another call to be cancelled or begun; the guard prevents
        recursion, so that answers are written in order.
        """
        if self._is_answering:
            return
        self._is_answering = True
        try:
            while self._order and (first := next(iter(self._order))) in self._results:
                relay, result = self._results.pop(first)
                self._removed(first)
                first.place = None
                if isinstance(result, BaseException):
                    deliver([first], result)
                else:
                    first.executed, first.submitted_ns = relay.executed, relay.submitted_ns
                    answer_with(first, result.outputs, relay.how, parameters_of(result))
        finally:
            self._is_answering = False
