"""The engine: it has the devices and the models, and executes what front ends pass on."""

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

from xlaserve.core.residence.registry import Registry
from xlaserve.core.serving.answers import parameters_of
from xlaserve.core.serving.engine import Engine
from xlaserve.core.serving.infer_call import InferCall
from xlaserve.core.serving.inference import InferResponse
from xlaserve.core.serving.ledger import Kind as Purpose
from xlaserve.core.serving.ledger import Ledger
from xlaserve.core.serving.principal import Principal
from xlaserve.errors import ModelNotReady
from xlaserve.models.handling import TensorParameters
from xlaserve.processes.failures import failure_of
from xlaserve.processes.fronts.bridge import Bridge, offered
from xlaserve.processes.fronts.mirror import Mirror, Viewer
from xlaserve.processes.fronts.records import Extra, Kind, Record, bytes_of, tensors_of
from xlaserve.processes.fronts.records import parameters_of as extra_of
from xlaserve.processes.handing import HandedConnections

_log = structlog.get_logger("fronts")


class FrontCall(InferCall):
    """An inference that a front end has passed on."""

    def __init__(
        self, front: "ConnectedFrontEnd", number: int, positions: Mapping[str, int]
    ) -> None:
        """`positions` has the outputs of its model."""
        self._front = front
        self.positions = positions
        self._number = number

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Send the answer to the front end."""
        self._front.answer(self._number, self, response)

    def refuse(self, error: BaseException) -> None:
        """Send an error to the front end."""
        self._front.refuse(self._number, error)


class ConnectedFrontEnd:
    """One front end, as the engine knows it."""

    def __init__(self, fronts: "FrontEnds") -> None:
        self._fronts = fronts
        self.bridge: Bridge
        self.viewer: Viewer
        self._calls: dict[int, FrontCall] = {}
        """Requests that were not answered at once."""

    def heard(self, records: Sequence[Record]) -> None:
        """Do what the front end asks for."""
        for record in records:
            if record[0] == Kind.REQUEST:
                self._begin(record)
            else:
                self._heard_of(record)

    def _heard_of(self, record: Record) -> None:
        match record[0]:
            case Kind.CANCEL:
                call = self._calls.pop(record[1], None)
                if call is not None:
                    call.cancel("its client does not wait")
            case Kind.DROPPED:
                self.bridge.dropped(record[1])
            case Kind.MIRRORED:
                self.viewer.acknowledge(record[1])
            case _:
                raise LookupError(f"a record of kind {record[0]}")

    def _begin(self, record: Record) -> None:
        _, number, handle, id_, place, flat, rows, key, chosen, started_ns, extra = record
        found = self._fronts.mirror.found.get(handle)
        if found is None:
            # Nothing leaves before its front ends know: a fault of this server, told to the client.
            gone = ModelNotReady("", "", "UNAVAILABLE", "the engine has it no more")
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
        call.started_ns = started_ns
        if extra is not None:
            _take_extra(call, extra)
        self._fronts.engine.begin_passed(call, found.version, found.instance)
        if not call.has_ended:
            self._calls[number] = call

    def answer(self, number: int, call: FrontCall, response: InferResponse) -> None:
        """Send an answer."""
        self._calls.pop(number, None)
        positions = call.positions
        flat: list[Any] = []
        total = 0
        for output in response.outputs:
            data = bytes_of(output.datatype, output.data)
            total += len(data)
            flat += (positions[output.name], output.data.shape, data)
        place = self.bridge.place(flat[2::3], total)
        if place >= 0:
            flat[2::3] = map(len, flat[2::3])
        executed = call.executed
        times = (0, 0, 0)
        if executed is not None:
            times = executed.begun_ns, executed.ended_ns, executed.rows
        given = parameters_of(response)
        said = None
        if given is not None:
            of_outputs = {name: dict(values) for name, values in given.outputs.items()}
            said = dict(given.answer), of_outputs
        self.bridge.say((Kind.ANSWER, number, place, flat, *times, said))

    def refuse(self, number: int, error: BaseException) -> None:
        """Send an error."""
        self._calls.pop(number, None)
        failure = failure_of(error)
        said = failure.error, failure.text, failure.needed_bytes
        self.bridge.say((Kind.FAILURE, number, *said))

    def lost(self) -> None:
        """Cancel what it has passed on: its clients are gone with it."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel("its front end is gone")
        self._fronts.left(self)
        _log.info("a front end has ended", requests=len(calls))


def _take_extra(call: FrontCall, extra: Mapping[str, Any]) -> None:
    call.parameters = extra_of(extra, Extra.PARAMETERS)
    if Extra.INPUT_PARAMETERS in extra:
        call.tensor_parameters = TensorParameters(
            extra_of(extra, Extra.INPUT_PARAMETERS), extra_of(extra, Extra.OUTPUT_PARAMETERS)
        )
    call.deadline = extra.get(Extra.DEADLINE)
    if Extra.PRINCIPAL in extra:
        call.principal = Principal(extra[Extra.PRINCIPAL])


class FrontEnds:
    """The front ends of the engine. Of the event loop."""

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
        """Take the connection to each front end that the parent starts, until cancelled."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(source.fileno(), readable.set)
        try:
            with self.mirror.following():
                while True:
                    await readable.wait()
                    readable.clear()
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        self._open(source.accept()[0])
        except EOFError:
            return  # the parent is gone, and this process is about to end
        finally:
            loop.remove_reader(source.fileno())

    def _open(self, end: socket.socket) -> None:
        opening = asyncio.ensure_future(self.connect(end))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def connect(self, end: socket.socket) -> None:
        """Serve the front end at the other end, once it has said which memory it shares."""
        end.setblocking(False)
        try:
            slabs = await offered(end)
        except (EOFError, OSError) as error:
            _log.warning("a front end has ended before it began", reason=str(error))
            end.close()
            return
        front = ConnectedFrontEnd(self)
        account = self._ledger.open()
        front.bridge = Bridge(slabs, account, Purpose.ANSWERS, front.heard, front.lost)
        await front.bridge.open(end)
        if not front.bridge.is_open:
            return
        self._connected.add(front)
        front.viewer = self.mirror.show(front.bridge.say)

    def left(self, front: ConnectedFrontEnd) -> None:
        """Serve a front end no more."""
        if front in self._connected:
            self._connected.discard(front)
            self.mirror.show_no_more(front.viewer)
