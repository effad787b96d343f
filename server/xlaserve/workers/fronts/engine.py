"""The engine process: owns devices and models, and executes requests of front ends."""

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from traceback import clear_frames
from typing import Any

import structlog

from xlaserve.errors import ModelNotReady
from xlaserve.errors.panics import ENDS
from xlaserve.net.ledger import Account, Ledger
from xlaserve.net.ledger import Kind as Purpose
from xlaserve.residence.registry import Registry
from xlaserve.runtime.handling import TensorParameters
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.answers import answer_last, parameters_of
from xlaserve.serving.call import Peer
from xlaserve.serving.engine import Engine
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.inference import InferResponse
from xlaserve.serving.stations.batching import Batcher
from xlaserve.serving.stations.direct import DirectQueue
from xlaserve.workers.failures import failure_of
from xlaserve.workers.fronts.bridge import Bridge, offered
from xlaserve.workers.fronts.mirror import Mirror, Viewer
from xlaserve.workers.fronts.records import NOWHERE, Extra, Kind, Record, bytes_of, tensors_of
from xlaserve.workers.fronts.records import parameters_of as extra_of
from xlaserve.workers.fronts.streams import Window
from xlaserve.workers.handing import HandedConnections

_log = structlog.get_logger("fronts")


class FrontCall(InferCall):
    """An inference request forwarded by a front end."""

    _window: Window | None = None
    """Flow-control window of a decoupled call; None before its first response."""

    said_caller = ""
    """The caller's name for fair scheduling, as sent by the front end."""

    def __init__(
        self, front: "ConnectedFrontEnd", number: int, positions: Mapping[str, int]
    ) -> None:
        """`positions` maps output names of the model to positions."""
        self._front = front
        self.positions = positions
        self._number = number
        self.peer = front.peer

    @property
    def caller(self) -> str:
        """Return the caller's name for fair scheduling."""
        return self.owner or self.said_caller

    @property
    def is_writable(self) -> bool:
        """Tell whether the front end can accept another response (backpressure)."""
        return self._window is None or self._window.is_open

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Send a response to the front end."""
        try:
            self._send(response, last=last)
        except ENDS:
            raise
        except BaseException as error:
            if last:
                self.outcome = error
            else:
                self.cancel("its answer cannot be encoded")
            self.refuse(error)

    def _send(self, response: InferResponse, *, last: bool) -> None:
        if last:
            if not self.is_cancelled:
                self._front.answer(self._number, self, response)
            return
        size, counted = self._front.answer_in_part(self._number, self, response)
        if self._window is None:
            self._window = Window()
            self.holds_anything = True
        self._window.send(size, counted)

    def taken(self, answers: int) -> None:
        """Reopen the window after the front end took responses; raises LookupError."""
        if self._window is None:
            raise LookupError(f"front end consumed {answers} responses of a request without any")
        self._front.account.release(self._window.take(answers), Purpose.ANSWERS)
        if self.is_writable:
            self.resume()

    def finish(self) -> None:
        """End the call before its model does, because the client has all it wants."""
        self.is_cancelled = True  # suppresses further responses
        begun_ns = self.submitted_ns or self.started_ns
        answer_last(self, Executed({}, begun_ns, time.perf_counter_ns(), self.rows))

    def release(self) -> None:
        """Release the window's bytes and other resources."""
        window = self._window
        if window is not None:
            self._window = None
            self._front.account.release(window.counted, Purpose.ANSWERS)
        super().release()

    def refuse(self, error: BaseException) -> None:
        """Send an error to the front end."""
        self._front.refuse(self._number, error)


class ConnectedFrontEnd:
    """One front end connected to this engine."""

    def __init__(self, fronts: "FrontEnds", account: Account) -> None:
        self._fronts = fronts
        self.account = account
        """Memory account for responses in transit and for model memory held by the requests."""
        self.peer = Peer(account=account)
        self.bridge: Bridge
        self.viewer: Viewer
        self._calls: dict[int, FrontCall] = {}
        """Requests that have not been answered."""

    def heard(self, records: Sequence[Record]) -> None:
        """Process records from the front end."""
        for record in records:
            try:
                if record[0] == Kind.REQUEST:
                    self._begin(record)
                else:
                    self._heard_of(record)
            except ENDS:
                raise
            except BaseException as error:
                if not self._is_of_a_request(record):
                    raise
                call = self._calls.get(record[1])
                if call is not None:
                    call.cancel("an unreadable record from its front end")
                # Drop references to the request's tensors, so that the slab block is freed even if
                # the exception is kept.
                clear_frames(error.__traceback__)
                _log.exception("request from front end failed", kind=record[0])
                self.refuse(record[1], error)

    def _is_of_a_request(self, record: Record) -> bool:
        """Tell whether a record concerns a single request, so that errors affect only that one."""
        if record[0] not in (Kind.REQUEST, Kind.CANCEL) or len(record) < 2:
            return False
        return type(record[1]) is int

    def _heard_of(self, record: Record) -> None:
        match record[0]:
            case Kind.CANCEL:
                _, number, is_finished = record
                call = self._calls.pop(number, None)
                if call is not None and is_finished:
                    call.finish()
                elif call is not None:
                    call.cancel("its client is not waiting")
            case Kind.TAKEN:
                call = self._calls.get(record[1])
                if call is not None:
                    call.taken(record[2])
            case Kind.DROPPED:
                self.bridge.dropped(record[1])
            case Kind.MIRRORED:
                self.viewer.acknowledge(record[1])
            case _:
                raise LookupError(f"unexpected record of kind {record[0]}")

    def _begin(self, record: Record) -> None:
        _, number, handle, id_, place, flat, rows, key, chosen, *rest = record
        started_ns, client, extra = rest
        found = self._fronts.mirror.found.get(handle)
        if found is None:
            # Cannot happen, since instances stay until front ends acknowledge their removal.
            gone = ModelNotReady("", "", "UNAVAILABLE", "the engine no longer has it")
            self.refuse(number, gone)
            return
        call = FrontCall(self, number, found.positions)
        call.id = id_
        call.inputs = tensors_of(found.inputs, flat, place, self.bridge.reader)
        if place >= 0:
            self.bridge.watch_drops()
        call.rows = rows
        if key:
            call.key = tuple(map(tuple, key))
        if chosen is not None:
            call.chosen = tuple([found.outputs[at] for at in chosen])
        call.started_ns, call.client = started_ns, client
        if extra is not None:
            _take_extra(call, extra)
        begun = self.bridge.begun
        before = 0 if begun is None else begun.begin(number)
        self._fronts.engine.begin_passed(call, found.version, found.instance)
        if not call.has_ended:
            self._calls[number] = call
            if begun is not None and isinstance(call.place, Batcher | DirectQueue):
                begun.put_back(number, before)
                call.on_begun = partial(begun.begin, number)

    def answer(self, number: int, call: FrontCall, response: InferResponse) -> None:
        """Send the last or only response to a request."""
        self._calls.pop(number, None)
        place, flat, _ = self._placed(call, response)
        executed = call.executed
        times = (0, 0, 0)
        if executed is not None:
            times = executed.begun_ns, executed.ended_ns, executed.rows
        self.bridge.say((Kind.ANSWER, number, place, flat, *times, _said_with(response)))

    def answer_in_part(
        self, number: int, call: FrontCall, response: InferResponse
    ) -> tuple[int, int]:
        """Send a response that more will follow.

        Returns its size, and how many of these bytes are charged until the front end takes it. Data
        in the slab is charged separately.
        """
        place, flat, total = self._placed(call, response)
        self.bridge.say((Kind.PART, number, place, flat, _said_with(response)))
        counted = total if place == NOWHERE else 0
        self.account.hold(counted, Purpose.ANSWERS)
        return total, counted

    def _placed(self, call: FrontCall, response: InferResponse) -> tuple[int, list[Any], int]:
        """Return the outputs in record form, their slab offset, and their total size."""
        positions = call.positions
        is_lenient = call.instance.info.is_lenient
        flat: list[Any] = []
        total = 0
        for output in response.outputs:
            data = bytes_of(output.datatype, output.data)
            total += len(data)
            at = positions[output.name]
            # For other models, the front end already knows the datatypes.
            head = (at, output.datatype.name) if is_lenient else at
            flat += (head, output.data.shape, data)
        place = self.bridge.place(flat[2::3], total)
        if place >= 0:
            flat[2::3] = map(len, flat[2::3])
        return place, flat, total

    def refuse(self, number: int, error: BaseException) -> None:
        """Send an error response."""
        self._calls.pop(number, None)
        self.bridge.say((Kind.FAILURE, number, *failure_of(error).fields))

    def unsaid(self, record: Record, error: BaseException) -> Record | None:
        """Return an error response for a request whose response cannot be serialized."""
        if record[0] not in (Kind.ANSWER, Kind.PART):
            # Otherwise the front end would show outdated models.
            self.bridge.close()
            return None
        call = self._calls.pop(record[1], None)
        if call is not None:
            call.cancel("its answer cannot be encoded")
        return Kind.FAILURE, record[1], *failure_of(error).fields

    def lost(self) -> None:
        """Cancel the requests of a front end that has ended: its clients are disconnected too."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel("its front end ended")
        self._fronts.left(self)
        _log.info("front end ended", requests=len(calls))


def _said_with(response: InferResponse) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the parameters of a response and its outputs; None if it cannot have any."""
    given = parameters_of(response)
    if given is None:
        return None
    return dict(given.answer), {name: dict(values) for name, values in given.outputs.items()}


def _take_extra(call: FrontCall, extra: Mapping[str, Any]) -> None:
    call.parameters = extra_of(extra, Extra.PARAMETERS)
    if Extra.INPUT_PARAMETERS in extra:
        call.tensor_parameters = TensorParameters(
            extra_of(extra, Extra.INPUT_PARAMETERS), extra_of(extra, Extra.OUTPUT_PARAMETERS)
        )
    call.deadline = extra.get(Extra.DEADLINE)
    if Extra.PRINCIPAL in extra:
        call.principal = Principal(extra[Extra.PRINCIPAL])
    call.said_caller = extra.get(Extra.CALLER, "")
    call.takes_many = extra.get(Extra.TAKES_MANY, False)
    call.wants_whole = extra.get(Extra.WANTS_WHOLE, False)


class FrontEnds:
    """All front ends connected to this engine. Used from the event loop only."""

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        ledger: Ledger,
        is_started: Callable[[], bool],
    ) -> None:
        self.engine = engine
        self.mirror = Mirror(registry, is_started)
        self._ledger = ledger
        self._connected: set[ConnectedFrontEnd] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def serve(self, source: HandedConnections) -> None:
        """Accept connections to the front ends that the parent starts, until cancelled."""
        try:
            with self.mirror.following():
                while True:
                    with suppress(ConnectionAbortedError):
                        self._open(await source.next())
        except EOFError:
            return  # the parent is gone, and this process will exit

    def _open(self, end: socket.socket) -> None:
        opening = asyncio.ensure_future(self.connect(end))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def connect(self, end: socket.socket) -> None:
        """Serve a front end, after receiving its shared memory."""
        end.setblocking(False)
        try:
            slabs = await offered(end)
        except (EOFError, OSError) as error:
            _log.warning("front end ended before it connected", reason=str(error))
            end.close()
            return
        account = self._ledger.open()
        front = ConnectedFrontEnd(self, account)
        front.bridge = Bridge(
            slabs, account, Purpose.ANSWERS, front.heard, front.lost, unsaid=front.unsaid
        )
        await front.bridge.open(end)
        if not front.bridge.is_open:
            return
        self._connected.add(front)
        front.viewer = self.mirror.show(front.bridge.say)

    def left(self, front: ConnectedFrontEnd) -> None:
        """Remove a front end whose process has ended."""
        if front in self._connected:
            self._connected.discard(front)
            self.mirror.show_no_more(front.viewer)
