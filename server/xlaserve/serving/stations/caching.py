"""The station that answers from the response cache (`response_cache`)."""

from collections.abc import Callable, Sequence
from functools import partial

from xlaserve.concurrency.host import HostThreads
from xlaserve.errors.panics import ENDS
from xlaserve.serving.answers import answer_with, deliver, parameters_of
from xlaserve.serving.call import Observer
from xlaserve.serving.infer_call import Executed, InferCall, Relayed
from xlaserve.serving.inference import InferOutput, InferResponse
from xlaserve.serving.response_cache import Key, Section, input_bytes, key_of
from xlaserve.serving.stations.around import Around
from xlaserve.serving.stations.deadlock import Waits
from xlaserve.serving.stations.relay import Relay
from xlaserve.serving.stations.station import Served, Station, Working
from xlaserve.serving.uses import Resolve, Use, are_current, note

_INLINE_BYTES = 1 << 16
"""Inputs up to this size are hashed on the event loop, in about 50 us; larger ones on a thread."""


class Caching(Around):
    """Answers from the cache; misses go to the inner station, coalesced by key.

    Equal calls in flight share one execution, called a flight. The first one, the leader, counts as
    a miss; the others count as hits when it succeeds, and fail if it fails. If the leader is
    cancelled or expires, the next call becomes the leader; when the last call leaves, the execution
    is cancelled.
    """

    def __init__(
        self,
        within: Station,
        section: Section,
        instance: Served,
        *,
        resolve: Resolve,
        waits: Waits,
        threads: HostThreads,
        counting: Observer,
        now_ns: Callable[[], int],
    ) -> None:
        super().__init__(within)
        self._section = section
        self._resolve = resolve
        self._waits = waits
        self._names = tuple(spec.name for spec in instance.info.inputs)
        self._instance = instance
        self._threads = threads
        self._counting = counting
        self._now_ns = now_ns
        self._flights: dict[Key, _Flight] = {}

    def begin(self, call: InferCall) -> None:
        """Answer a call from the cache, or execute it; raises like the inner station."""
        if call.resident or call.is_volatile:
            # The tensors may be on a device, or may change before they are executed.
            self.within.begin(call)
        elif input_bytes(call) > _INLINE_BYTES:
            self._begin_later(call)
        else:
            begun = self._now_ns()
            self._begin(call, key_of(call, self._names), begun)

    def _begin_later(self, call: InferCall) -> None:
        """Compute the key of a call with large inputs on a thread, then begin the call."""
        begun = self._now_ns()
        call.submitted_ns = call.submitted_ns or begun

        def made(key: Key | BaseException) -> None:
            call.place = None
            if call.has_ended:
                return
            if isinstance(key, BaseException):
                deliver([call], key)
                return
            try:
                self._begin(call, key, begun)
            except ENDS:
                raise
            except BaseException as error:
                deliver([call], error)

        job = self._threads.start(partial(key_of, call, self._names), made, self._instance.model)
        call.wait_at(Working(job))

    def _begin(self, call: InferCall, key: Key, begun: int) -> None:
        entry = self._section.find(key)
        if entry is not None and entry.uses and not are_current(entry.uses, self._resolve):
            self._section.drop(entry)
            entry = None
        if entry is not None:
            note(call.parent, entry.uses)
            if call.shaping is None and not call.read_from:
                # If an outer station processes the answer further, this call is a relay, whose
                # `kept` is unused.
                call.kept = entry
            answer_again(call, entry.outputs, begun, self._now_ns())
            return
        # Calls with different queue parameters do not share an execution.
        flight_key = (*key, call.parameters.get("priority"), call.parameters.get("timeout"))
        looked = self._now_ns() - begun
        call.submitted_ns = call.submitted_ns or begun
        flight = self._flights.get(flight_key)
        if flight is not None and flight.is_current(self._resolve):
            flight.join(call, looked)
            self._waits.watch(call)
            return
        flight = _Flight(self, key, flight_key, call, looked)
        self._flights[flight_key] = flight
        try:
            self.within.begin(flight.relay)
        except BaseException:
            flight.close()
            raise
        if not call.has_ended:
            self._waits.watch(call)

    # --- called by flights ---

    def relay(self, call: InferCall, flight: "_Flight") -> Relay:
        """Return a call that is executed on behalf of others."""
        return Relay(call, self._counting, flight.completed)

    def keep(self, key: Key, outputs: Sequence[InferOutput], uses: frozenset[Use]) -> int:
        """Cache an answer if the models it used are unchanged; return the time taken in ns."""
        begun = self._now_ns()
        if not uses or are_current(uses, self._resolve):
            self._section.keep(key, outputs, uses)
        return self._now_ns() - begun

    def landed(self, flight_key: Key, flight: "_Flight") -> None:
        """Record the end of a flight."""
        if self._flights.get(flight_key) is flight:
            del self._flights[flight_key]


class _Flight:
    """One shared execution and the calls waiting for it (a Holder)."""

    def __init__(
        self, station: Caching, key: Key, flight_key: Key, leader: InferCall, looked: int
    ) -> None:
        self._station = station
        self._key = key
        self._flight_key = flight_key
        self._waiting: dict[InferCall, int] = {}
        """Waiting calls in arrival order, the leader first, with their lookup times in ns."""
        self._has_landed = False
        self.relay = station.relay(leader, self)
        self.join(leader, looked)

    def join(self, call: InferCall, looked: int) -> None:
        """Add a call that waits for the answer."""
        self._waiting[call] = looked
        call.wait_at(self)

    def awaited(self, call: InferCall) -> Sequence[InferCall]:
        """Return the relay, for which the calls wait."""
        return (self.relay,)

    def is_current(self, resolve: Resolve) -> bool:
        """Tell whether the models used so far by the execution are unchanged."""
        return are_current(self.relay.uses or (), resolve)

    def leave(self, call: InferCall) -> None:
        """Remove a call; the last one to leave cancels the execution."""
        self._waiting.pop(call, None)
        if not self._waiting and not self._has_landed:
            self.close()
            self.relay.cancel("no caller is waiting for the answer")

    def close(self) -> None:
        """Accept no more calls."""
        self._has_landed = True
        for call in self._waiting:
            call.place = None
        self._waiting.clear()
        self._station.landed(self._flight_key, self)

    def completed(self, relay: Relay, result: InferResponse | BaseException) -> None:
        """Answer all waiting calls, and cache the answer."""
        if self._has_landed:
            return
        waiting = tuple(self._waiting.items())
        self.close()
        if isinstance(result, BaseException):
            deliver([call for call, _ in waiting], result)
            return
        # Answers with parameters are not cached: the parameters belong to this execution only.
        is_plain = type(result) is InferResponse
        uses = frozenset(relay.uses or ())
        took = self._station.keep(self._key, result.outputs, uses) if is_plain else 0
        for call, _ in waiting:
            note(call.parent, uses)
        for index, (call, looked) in enumerate(waiting):
            if not call.has_ended:
                call.executed = relay.executed
                how = Relayed(hit_ns=looked) if index else Relayed(miss_ns=looked + took)
                answer_with(call, result.outputs, how, parameters_of(result))


def answer_again(
    call: InferCall, outputs: tuple[InferOutput, ...], begun_ns: int, ended_ns: int
) -> None:
    """Answer a call from the cache, in the same iteration of the event loop."""
    call.executed = Executed({}, ended_ns, ended_ns)
    answer_with(call, outputs, Relayed(hit_ns=ended_ns - begun_ns))
