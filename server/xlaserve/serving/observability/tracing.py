"""Request tracing that can be switched at run time, for all models or for one.

While tracing is off it observes no calls and costs nothing (trace extension).
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import structlog

from xlaserve.concurrency.control_plane import Change, ChangeKind, ControlPlane, OneProcess
from xlaserve.errors import InvalidParameter, SwitchedOff, Unsupported
from xlaserve.serving.access.sight import require_all_seen
from xlaserve.serving.call import Call, Operation, Outcome, outside_call
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.gates import Gates
from xlaserve.serving.infer_call import InferCall
from xlaserve.serving.observability.opentelemetry import OpenTelemetry, new_trace_id
from xlaserve.serving.observability.spans import (
    TRACEPARENT,
    CallSpan,
    StatusReporting,
    add_part,
    span_of,
    trace_parent,
)
from xlaserve.serving.observability.trace_file import TraceFile
from xlaserve.serving.observability.traced_call import TracedCall, traced

T = TypeVar("T")

MODE = "triton"
"""The `trace_mode` for files in Triton's format."""
OPENTELEMETRY = "opentelemetry"
"""The `trace_mode` for exported spans."""
OFF, TIMESTAMPS = "OFF", "TIMESTAMPS"

_SPANNED = frozenset({Operation.MANAGE, Operation.RUNTIME})
"""Operations that get spans in addition to inferences: loads, and calls of ModelMesh."""
_LARGEST = 2**31 - 1
_INTEGER = re.compile("-?[0-9]{1,10}", re.ASCII)
_MOST_PENDING = 4096
"""Maximum number of unwritten traces; further ones are dropped."""
_FLUSH_SECONDS = 0.5
_CLOSING_SECONDS = 5.0
_SHOWN_CHARACTERS = 80

_log = structlog.get_logger("tracing")


@dataclass(frozen=True, slots=True)
class TraceSetting:
    """Trace settings; None in a model's settings inherits the global value."""

    level: str | None = None
    rate: int | None = None
    """One of every `rate` requests is traced."""
    count: int | None = None
    """Number of requests still to be traced; -1 for no limit."""
    log_frequency: int | None = None
    """Traces per numbered file; 0 for a single file."""

    def over(self, below: "TraceSetting") -> "TraceSetting":
        """Return these settings, with unset values taken from `below`."""
        given = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) is not None
        }
        return replace(below, **given)


DEFAULT = TraceSetting(OFF, 1000, -1, 0)
"""Triton's defaults."""


def _is_found(call: Call) -> TypeGuard[InferCall]:
    return call.is_found and isinstance(call, InferCall)


class Tracing:
    """The trace settings, and the observer that records traces."""

    def __init__(
        self,
        gates: Gates,
        path: Path | None,
        max_bytes: int,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
        clock: Callable[[], int] = time.perf_counter_ns,
        *,
        start: TraceSetting = DEFAULT,
        spans: OpenTelemetry | None = None,
        reporting: StatusReporting | None = None,
        plane: ControlPlane | None = None,
    ) -> None:
        """Without `path` and `spans` tracing is unavailable; `in_thread` runs blocking functions.

        `start` has the initial global settings, which also apply after they are cleared. If `spans`
        is given, spans are exported instead of writing the file.
        """
        self._plane = plane or OneProcess()
        self._plane.handle(ChangeKind.TRACE, self._make)
        self._spans, self._reporting = spans, reporting
        self._default = start
        self._gates = gates
        self._in_thread = in_thread
        self._clock = clock
        self.path = path
        self._file = None if path is None else TraceFile(path, max_bytes)
        self._all = self._default
        self._models: dict[str, TraceSetting] = {}
        self._left: dict[str, int] = {}
        """Requests until the next traced one, including it, by model; the empty name is for the
        global setting.
        """
        self._ids = count(1)
        self._pending: list[tuple[TracedCall, int]] = []
        self._waiting: list[CallSpan] = []
        self._reported = 0
        """Lost spans already reported in the log."""
        self._lost = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._is_on = False
        self._observe()

    # --- settings ---

    def get(self, model: str = "") -> TraceSetting:
        """Return the effective settings of a model; an empty name means the global ones."""
        own = self._models.get(model)
        # Fast path for most models: this runs for every request while tracing.
        return self._all if own is None else own.over(self._all)

    def texts(self, model: str = "") -> dict[str, str | list[str]]:
        """Return the effective settings in Triton's format: strings, and the level in a list."""
        setting = self.get(model)
        return {
            "trace_level": [str(setting.level)],
            "trace_rate": str(setting.rate),
            "trace_count": str(setting.count),
            "log_frequency": str(setting.log_frequency),
            "trace_file": "" if self.path is None else str(self.path),
            "trace_mode": MODE if self._spans is None else OPENTELEMETRY,
        }

    async def change(self, model: str, change: Mapping[str, Sequence[str] | None]) -> None:
        """Update the settings in every process of the server."""

        async def here() -> None:
            self.update(model, change)

        await self._plane.apply(Change(ChangeKind.TRACE, model, change), here)

    async def _make(self, change: Change) -> None:
        self.update(change.subject, change.arguments)

    def update(self, model: str, change: Mapping[str, Sequence[str] | None]) -> None:
        """Change trace settings, all or none; an empty value clears one (trace extension).

        Raises InvalidParameter, Unsupported for settings that are fixed at startup, and SwitchedOff
        if there is no trace file.
        """
        if not model:
            require_all_seen()
        old = self._models.get(model, TraceSetting()) if model else self._all
        new = old
        for name, values in change.items():
            if name in ("trace_file", "trace_mode"):
                raise Unsupported(f"changing {name} by a request")
            if name not in _FIELDS:
                known = ", ".join(_FIELDS)
                raise InvalidParameter(name[:_SHOWN_CHARACTERS], f"one of {known}", "another name")
            field, read = _FIELDS[name]
            cleared = None if model else getattr(self._default, field)
            new = replace(new, **{field: read(name, values) if values else cleared})
        if new.level == TIMESTAMPS and self._file is None and self._spans is None:
            raise SwitchedOff("tracing", "trace_file")
        if model:
            self._models[model] = new
        else:
            self._all = new
        # Models with their own settings may still inherit the global rate.
        if model:
            self._left.pop(model, None)
        else:
            self._left.clear()
        self._observe()
        _log.info(
            "trace setting changed", model=model, **{k: list(v or ()) for k, v in change.items()}
        )

    def _observe(self) -> None:
        """Observe calls only while some setting enables tracing."""
        settings = [self._all, *(self.get(model) for model in self._models)]
        is_on = any(setting.level == TIMESTAMPS and setting.count for setting in settings)
        if is_on != self._is_on:
            self._is_on = is_on
            if is_on:
                self._gates.observe(self, needs_records=self._spans is None)
            else:
                self._gates.observe_no_more(self)

    # --- recording ---

    @property
    def exports_spans(self) -> bool:
        """Tell whether traces are exported spans."""
        return self._spans is not None

    def dropped(self) -> int:
        """Return the number of spans lost so far, at any stage."""
        return 0 if self._spans is None else self._spans.dropped

    @property
    def began(self) -> Callable[[Call], None] | None:
        """Return the callback that samples calls when they begin, or None."""
        return None if self._spans is None else self._begin

    def _begin(self, call: Call) -> None:
        """Attach a record to a call that is or may be traced."""
        if not isinstance(call, InferCall) and call.operation not in _SPANNED:
            return
        if call.parent is not None:
            whole = call.parent.record
            if whole is not None and whole.trace is not None:
                self._note(call)
            return
        if self._models:
            self._note(call)  # which settings apply depends on its model
            return
        sampled = None
        if call.headers.get(TRACEPARENT) is not None:
            parent = trace_parent(call.headers)
            sampled = None if parent is None else parent.sampled
        if sampled is None:
            # Fast path of most calls, with `_is_due` inlined.
            left = self._left.get("", 0)
            if left > 1:
                self._left[""] = left - 1
                return
        if self._picked("", sampled) is not None:
            self._note(call).is_picked = True

    def _note(self, call: Call) -> CallRecord:
        record = call.record
        if record is None:
            record = call.record = CallRecord(self._clock())
        record.trace = []
        return record

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        """Trace the sampled calls among those ended."""
        now = self._clock()
        if self._spans is not None:
            self._end_spans(calls, outcome, now)
            return
        for call in calls:
            if _is_found(call) and call.started_ns:
                setting = self._picked(call.found.model)
                if setting is not None:
                    self._keep(traced(call, outcome, now, next(self._ids)), setting)

    def _end_spans(self, calls: Sequence[Call], outcome: Outcome, now: int) -> None:
        for call in calls:
            record = call.record
            if record is None or record.trace is None:
                continue
            if call.parent is not None:
                add_part(call.parent, span_of(call, record, outcome, now))
                continue
            parent = trace_parent(call.headers)
            if not record.is_picked:
                model = call.found.model if _is_found(call) else ""
                if self._picked(model, None if parent is None else parent.sampled) is None:
                    continue
            trace_id = new_trace_id() if parent is None else parent.trace_id
            if _is_found(call) and not isinstance(outcome, BaseException):
                call.found.statistics.traced(trace_id, now - call.started_ns, time.time_ns())
            span = span_of(
                call, record, outcome, now, parent, trace_id=trace_id, reporting=self._reporting
            )
            self._keep_span(span)

    def _keep_span(self, span: CallSpan) -> None:
        assert self._spans is not None
        if len(self._waiting) >= _MOST_PENDING:
            self._spans.drop([span])
            return
        self._waiting.append(span)
        if self._timer is None:
            # Export later, when most answers have been written.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FLUSH_SECONDS, self._export, context=outside_call())

    def _export(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, []
        assert self._spans is not None
        self._spans.keep(waiting)
        self._tell_of_losses(self._spans.dropped)

    def _tell_of_losses(self, dropped: int) -> None:
        if lost := dropped - self._reported:
            self._reported = dropped
            _log.warning("spans lost", count=lost)

    def _picked(self, model: str, sampled: bool | None = None) -> TraceSetting | None:
        """Return the settings of a model if its next request is to be traced, and count it.

        A client's own sampling decision overrides the rate.
        """
        setting = self.get(model)
        if setting.level != TIMESTAMPS or not setting.count or sampled is False:
            return None
        key = model if model in self._models else ""
        if sampled is None and not self._is_due(key, setting.rate or 1):
            return None
        if setting.count is not None and setting.count > 0:
            left = setting.count - 1
            # A global count is shared by all models that inherit it.
            if self._models.get(model, TraceSetting()).count is not None:
                self._models[model] = replace(self._models[model], count=left)
            else:
                self._all = replace(self._all, count=left)
            if not left:
                # In the next iteration: the gates are still iterating over this call's observers.
                asyncio.get_running_loop().call_soon(self._observe)
        return setting

    def _is_due(self, key: str, rate: int) -> bool:
        left = self._left.get(key, rate) - 1
        self._left[key] = left or rate
        return not left

    # --- the trace file ---

    def _keep(self, trace: TracedCall, setting: TraceSetting) -> None:
        if len(self._pending) >= _MOST_PENDING:
            self._lost += 1
            return
        self._pending.append((trace, setting.log_frequency or 0))
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                _FLUSH_SECONDS, self._begin_to_write, context=outside_call()
            )

    def _begin_to_write(self) -> None:
        self._timer = None
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        assert self._file is not None
        try:
            while self._pending:
                pending, self._pending = self._pending, []
                lost, self._lost = self._lost, 0
                if lost:
                    _log.warning("traces lost", count=lost)
                for each in dict.fromkeys(each for _, each in pending):
                    # By now the answers have been written, except to slow clients.
                    traces = [trace.whole() for trace, wanted in pending if wanted == each]
                    if not await self._in_thread(partial(self._file.write, traces, each)):
                        self._stop("the files reached max_trace_bytes")
        except OSError as error:
            self._stop(str(error))
        finally:
            self._writing = None

    def _stop(self, reason: str) -> None:
        """Disable tracing, because traces cannot be written."""
        self._pending.clear()
        self._all = replace(self._all, level=OFF)
        self._models.clear()
        self._observe()
        _log.warning("tracing stopped", reason=reason, file=str(self.path))

    async def close(self) -> None:
        """Stop observing, and write pending traces."""
        self._all, self._models = DEFAULT, {}
        self._observe()
        if self._timer is not None:
            self._timer.cancel()
        if self._spans is not None:
            self._export()
            if not await self._in_thread(partial(self._spans.close, _CLOSING_SECONDS)):
                _log.warning("traces not exported", reason="the collector does not accept them")
            self._tell_of_losses(self._spans.dropped)
        if self._writing is not None:
            await self._writing
        if self._pending:
            await self._write()


def _level(name: str, values: Sequence[str]) -> str:
    known = (OFF, TIMESTAMPS)
    if "TENSORS" in values:
        raise Unsupported("tracing of tensors (trace_level TENSORS)")
    if len(values) != 1 or values[0] not in known:
        shown = ", ".join(values)[:_SHOWN_CHARACTERS]
        raise InvalidParameter(name, " or ".join(known), shown)
    return values[0]


def _number(smallest: int, name: str, values: Sequence[str]) -> int:
    text = values[0] if len(values) == 1 else ", ".join(values)
    if (
        text.removeprefix("-").isdecimal()
        and text.isascii()
        and len(text) <= len(str(_LARGEST)) + 1
    ):
        number = int(text)
        if smallest <= number <= _LARGEST:
            return number
    expected = f"an integer of {smallest} to {_LARGEST}"
    raise InvalidParameter(name, expected, repr(text[:_SHOWN_CHARACTERS]))


_FIELDS: Mapping[str, tuple[str, Callable[[str, Sequence[str]], Any]]] = {
    "trace_level": ("level", _level),
    "trace_rate": ("rate", partial(_number, 1)),
    "trace_count": ("count", partial(_number, -1)),
    "log_frequency": ("log_frequency", partial(_number, 0)),
}
"""The field and parser of each setting."""
