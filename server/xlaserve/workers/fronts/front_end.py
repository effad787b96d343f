"""A front-end process: talks to clients, and forwards their inferences to the engine."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import Any

import structlog

from xlaserve.errors import EngineGone, EngineLost, Overloaded, ProcessSilent, XlaserveError
from xlaserve.errors.panics import ENDS
from xlaserve.language.text_limits import DEFAULT_TEXT_LIMITS, TextLimits
from xlaserve.net.ledger import Kind as Purpose
from xlaserve.net.ledger import Ledger
from xlaserve.residence.capacity import Capacity, Reservation
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Instance, Registry, Version
from xlaserve.runtime.handling import AnswerParameters
from xlaserve.serving.access.sight import without_hidden
from xlaserve.serving.answers import answer_last, deliver, respond
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.inference import InferResponse
from xlaserve.serving.stations.station import MakeStation
from xlaserve.tensors import TensorSpec
from xlaserve.workers.failures import error_of
from xlaserve.workers.fronts import description
from xlaserve.workers.fronts.bridge import Bridge, offer
from xlaserve.workers.fronts.passing import PassedModel
from xlaserve.workers.fronts.records import NOWHERE, Kind, Record, as_given, tensors_of
from xlaserve.workers.fronts.streams import Taking
from xlaserve.workers.fronts.texts import Texts, Wanted
from xlaserve.workers.handing import HandedConnections
from xlaserve.workers.messages import Failure

_GONE = "the engine process ended and is being replaced"

_GONE_VERSION = State.UNAVAILABLE, "", "", 0, b"", "", ""
"""A row that shows a version as unavailable after the engine removed it."""

_log = structlog.get_logger("fronts")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a front end."""

    shared_bytes: int
    """Size of both slabs together."""
    requests: int
    """Maximum number of unanswered requests in the engine."""
    texts: TextLimits = DEFAULT_TEXT_LIMITS


class _Passed:
    """Lets a request that was forwarded to the engine be abandoned (a Holder)."""

    __slots__ = ("_front", "_number")

    def __init__(self, front: "FrontEnd", number: int) -> None:
        self._front = front
        self._number = number

    def leave(self, call: InferCall) -> None:
        """Tell the engine that the request was abandoned."""
        self._front.leave(self._number, call)


class FrontEnd:
    """Shows the engine's models in the registry, and forwards requests. Event loop only."""

    def __init__(
        self,
        registry: Registry,
        capacity: Capacity,
        ledger: Ledger,
        make_station: MakeStation,
        limits: Limits,
    ) -> None:
        self._registry = registry
        self._capacity = capacity
        # No models are loaded here: the engine accounts for all memory.
        capacity.limit({})
        self._ledger = ledger
        self._make_station = make_station
        self._limits = limits
        self._bridge: Bridge | None = None
        self._calls: dict[int, tuple[InferCall, PassedModel]] = {}
        """Forwarded requests, by number."""
        self._streams: dict[int, Taking] = {}
        """Forwarded requests that may get several responses."""
        self._last = 0
        """Number of the last forwarded request."""
        self._table: dict[str, Sequence[Any]] = {}
        """The engine's models, as of the last revision."""
        self._revisions: deque[Sequence[Any]] = deque()
        """Revisions received but not applied yet: the first one waits for its tokenizers."""
        self._texts = Texts(limits.texts)
        self._reading: asyncio.Task[None] | None = None
        """Reads the tokenizers for the first revision."""
        self._unshown: set[str] = set()
        self._is_started = False
        self._started = asyncio.Event()
        self.engine_answers: Callable[[], bool] = lambda: True
        """Tells whether the engine responds; if not, no request is forwarded to it."""
        self.may_show: Callable[[], bool] = lambda: True
        """Tells whether the engine has every model that clients loaded. A replacement does not have
        them yet, and must not make them appear missing."""

    async def started(self) -> None:
        """Wait until the engine has loaded its initial models and they are visible here."""
        await self._started.wait()

    async def serve(self, source: HandedConnections) -> None:
        """Accept connections to the engines that the parent starts, until cancelled.

        Raises OSError if the connection cannot be set up for lack of files or memory.
        """
        try:
            while True:
                await self.connect(await source.next())
        except EOFError:
            return  # the parent is gone, and this process will exit

    async def connect(self, end: socket.socket) -> None:
        """Forward requests to the engine at the other end from now on; raises OSError."""
        if self._bridge is not None:
            self._bridge.close()
        end.setblocking(False)
        try:
            slabs = offer(end, self._limits.shared_bytes)
        except ConnectionError as error:
            _log.warning("engine not connected", reason=str(error))
            end.close()
            return
        account = self._ledger.open()
        self._forget_revisions()
        self._table.clear()
        self._unshown = {model.name for model in self._registry.models()}
        self._is_started = False
        # Set before opening, since the engine may send before `open` returns.
        self._bridge = Bridge(
            slabs, account, Purpose.REQUESTS, self._heard, self._lost, unsaid=self._unsaid
        )
        await self._bridge.open(end)

    # --- Requests ---

    def pass_on(self, model: PassedModel, call: InferCall) -> None:
        """Forward a call to the engine; raises EngineGone, ProcessSilent or Overloaded."""
        bridge = self._bridge
        if bridge is None or bridge is not model.bridge:
            raise EngineGone(call.model)
        if not self.engine_answers():
            raise ProcessSilent(f"model '{call.model}'", "engine")
        if len(self._calls) >= self._limits.requests:
            raise Overloaded(call.model, self._limits.requests, "max_front_end_requests")
        self._last = number = self._last + 1
        bridge.say(model.request(number, call))
        call.is_counted_elsewhere = True
        self._calls[number] = call, model
        call.wait_at(_Passed(self, number))
        if call.takes_many and model.info.is_decoupled:
            self._streams[number] = Taking(call, partial(self._note_taken, number))
            # If the client finishes the call before the model does, the call has left its place by
            # then, so `_Passed.leave` is not called.
            call.hold(partial(self.leave, number, call))

    def leave(self, number: int, call: InferCall) -> None:
        """Tell the engine that a request was abandoned, unless it was answered already."""
        self._streams.pop(number, None)
        if self._calls.pop(number, None) is not None and self._bridge is not None:
            self._bridge.say((Kind.CANCEL, number, call.executed is not None))

    def _note_taken(self, number: int, answers: int) -> None:
        if self._bridge is not None:
            self._bridge.say((Kind.TAKEN, number, answers))

    def _heard(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                if record[0] == Kind.ANSWER:
                    self._answered(record)
                elif record[0] == Kind.PART:
                    self._answered_in_part(record)
                else:
                    self._heard_of(record)
            except ENDS:
                raise
            except BaseException as error:
                if record[0] not in (Kind.ANSWER, Kind.PART, Kind.FAILURE):
                    raise
                # Drop references to the response's tensors, so that the slab block is freed even if
                # the exception is kept.
                clear_frames(error.__traceback__)
                if not isinstance(error, XlaserveError):
                    _log.exception("engine answer not readable", kind=record[0])
                self._failed(record[1], error)

    def _failed(self, number: int, error: BaseException) -> None:
        """Answer a single request with an error, without affecting others."""
        call, _ = self._calls.get(number, (None, None))
        if call is not None:
            self.leave(number, call)
            deliver([call], error)

    def _unsaid(self, record: Record, error: BaseException) -> None:
        """Answer a request that could not be serialized, and so never reached the engine."""
        if record[0] == Kind.REQUEST:
            self._failed(record[1], error)

    def _heard_of(self, record: Record) -> None:
        match record[0]:
            case Kind.DROPPED if self._bridge is not None:
                self._bridge.dropped(record[1])
            case Kind.FAILURE:
                number, kind, text, facts = record[1:]
                call, _ = self._calls.pop(number, (None, None))
                if call is not None:
                    # Hide model names: the engine does not know which models the caller may see.
                    error = error_of(Failure(kind, text, facts))
                    deliver([call], without_hidden(call, error, ()))
            case Kind.MODELS:
                self._revisions.append(record[1:])
                if self._reading is None:
                    self._take_revisions()
            case _:
                raise LookupError(f"unexpected record of kind {record[0]}")

    def _answered(self, record: Record) -> None:
        _, number, place, flat, begun_ns, ended_ns, rows, parameters = record
        call, model = self._calls.get(number, (None, None))
        if call is None or model is None:
            self._drop(place)
            return
        response = self._response(call, model, place, flat, parameters) if flat else None
        del self._calls[number]
        call.place = None
        if self._streams:
            self._streams.pop(number, None)
        answer_last(call, Executed({}, begun_ns, ended_ns, rows), response)

    def _answered_in_part(self, record: Record) -> None:
        _, number, place, flat, parameters = record
        call, model = self._calls.get(number, (None, None))
        taking = self._streams.get(number)
        if call is None or model is None or taking is None:
            self._drop(place)
            return
        call.answer(self._response(call, model, place, flat, parameters), last=False)
        data = flat[2::3]
        taking.wrote(sum(map(len, data)) if place == NOWHERE else sum(data))

    def _response(
        self, call: InferCall, model: PassedModel, place: int, flat: Sequence[Any], parameters: Any
    ) -> InferResponse:
        """Build the response to a call; raises if that fails."""
        bridge = self._bridge
        specs: Sequence[TensorSpec] = model.info.outputs
        assert bridge is not None
        is_lenient = model.info.is_lenient
        if is_lenient:
            specs, flat = as_given(specs, flat)
        outputs = tensors_of(specs, flat, place, bridge.reader)
        if place >= 0:
            bridge.watch_drops()
        if model.info.is_decoupled or is_lenient:
            # The model chooses the outputs of each response.
            call.chosen = tuple([specs[at] for at in flat[::3]])
        given = None if parameters is None else AnswerParameters(*parameters)
        return respond(call, outputs, given)

    def _drop(self, place: int) -> None:
        """Release the slab block of an abandoned response."""
        bridge = self._bridge
        if place >= 0 and bridge is not None and bridge.reader is not None:
            bridge.reader.view(place, 0)
            bridge.watch_drops()

    def _lost(self) -> None:
        """Fail all forwarded requests, and show every model as not ready.

        A request that the engine may have begun must not be retried, since it may have crashed the
        engine.
        """
        begun = None if self._bridge is None else self._bridge.begun
        self._bridge = None
        self._forget_revisions()
        calls, self._calls = self._calls, {}
        self._streams.clear()
        for number, (call, _) in calls.items():
            call.is_counted_elsewhere = False
            call.place = None
            waited = begun is not None and not begun.has_begun(number)
            deliver([call], (EngineGone if waited else EngineLost)(call.model))
        for model in self._registry.models():
            for version in model.versions.values():
                if version.instance is not None:
                    version.instance.suspend(_GONE)
        self._registry.notify()
        _log.warning("engine ended", requests=len(calls))

    # --- Models ---

    def _take_revisions(self) -> None:
        """Apply received revisions in order, up to one whose tokenizers must be read first."""
        self._reading = None
        while self._revisions:
            if missing := self._texts.missing(_texts_of(self._revisions[0][1])):
                self._reading = asyncio.ensure_future(self._texts.read(missing))
                self._reading.add_done_callback(self._has_read)
                return
            self._models(*self._revisions.popleft())

    def _has_read(self, reading: "asyncio.Task[None]") -> None:
        if reading is not self._reading or self._bridge is None:
            return  # of an engine that is gone
        try:
            self._take_revisions()
        except Exception:
            # Both ends run the same version, so this is a bug in the server.
            _log.exception("bridge closed after an unreadable record")
            self._bridge.close()

    def _forget_revisions(self) -> None:
        """Drop the revisions and tokenizers of an engine that has ended."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
        self._revisions.clear()
        self._texts.clear()

    def _models(
        self, revision: int, changed: Sequence[Any], gone: Sequence[str], is_started: bool
    ) -> None:
        for name, versions in changed:
            self._table[name] = versions
            self._unshown.add(name)
        for name in gone:
            self._table.pop(name, None)
            self._unshown.add(name)
        self._is_started = is_started
        self._texts.keep(row[4] for rows in self._table.values() for row in rows)
        self.show()
        assert self._bridge is not None
        self._bridge.say((Kind.MIRRORED, revision))

    def show(self) -> None:
        """Apply the engine's latest models to the registry, if they may be shown yet."""
        if self._bridge is None or not self.may_show():
            return
        unshown, self._unshown = self._unshown, set()
        for name in unshown:
            self._show(name, self._table.get(name, ()))
        if unshown:
            self._registry.notify()
        if self._is_started:
            self._started.set()

    def _show(self, name: str, versions: Sequence[Any]) -> None:
        numbers = {number for number, *_ in versions}
        self._registry.failed.forget(name)
        for number, *of_version in versions:
            if not number:
                self._registry.failed.note(name, of_version[1])
                continue
            self._show_version(self._registry.version(name, number), of_version)
        model = self._registry.find(name)
        if model is None:
            return
        for number in [number for number in model.versions if number not in numbers]:
            self._show_version(model.versions.pop(number), _GONE_VERSION)
        if not model.versions:
            self._registry.forget(name)

    def _show_version(self, version: Version, row: Sequence[Any]) -> None:
        state, reason, fault, handle, described, _, url = row
        version.lifecycle.follow(State(state), reason)
        before = version.instance
        if not handle:
            version.put(None)
        elif before is None or not self._is_current(before, handle):
            version.put(self._instance(version.model, handle, described))
        if before is not None and before is not version.instance:
            before.leave()
        if version.instance is not None:
            version.instance.fault, version.instance.url = fault, url

    def _is_current(self, instance: Instance, handle: int) -> bool:
        runner = instance.runner
        assert isinstance(runner, PassedModel)
        return runner.handle == handle and runner.bridge is self._bridge

    def _instance(self, name: str, handle: int, described: bytes) -> Instance:
        info, config = description.read(described)
        info = self._texts.with_text(handle, info)
        assert self._bridge is not None
        return Instance(
            PassedModel(handle, info, self._bridge, self.pass_on),
            handle,
            Reservation(self._capacity, name),
            config,
            make_station=self._make_station,
        )


def _texts_of(changed: Sequence[Any]) -> Iterator[Wanted]:
    """Yield the changed instances, with the digests of their tokenizers."""
    for name, versions in changed:
        for *_, handle, described, digest, _ in versions:
            yield Wanted(name, handle, described, digest)
