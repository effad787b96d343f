"""The access log: a record of each call of a client, sampled by rule, written beside the requests.

An observer of calls makes entries on the event loop; a thread writes them as lines of JSON. Nothing
of it waits: what does not fit into the queue is dropped, and the log says how many were.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

import msgspec
import structlog

from xlaserve.core.serving.access_file import AccessFile
from xlaserve.core.serving.call import Call, Outcome, Peer, outside_call
from xlaserve.core.serving.call_record import CallRecord
from xlaserve.core.serving.infer_call import Executed, InferCall
from xlaserve.core.threads.batches import BatchThread

MAX_RECORD_BYTES = 8192
"""Most bytes of one line: ids and texts of errors are what clients send."""

_MAX_NAME = 128
_MAX_ERROR = 512
_FLUSH_SECONDS = 0.05
_WRITTEN_SECONDS = 5.0
"""Seconds within which the bytes of an answer are waited for: large ones are written later."""
_BATCH = 512
_CLOSING_SECONDS = 2.0
_TOLD_SECONDS = 10.0
"""Seconds between two warnings of the log that records were dropped."""
_ERROR_STATUS = 400

StatusOf: TypeAlias = Callable[[BaseException | None, str, int], str]
"""Names the status that a client was told, of the error, its listener, and a status of HTTP."""

InThread: TypeAlias = Callable[[Callable[[], bool]], Awaitable[bool]]

_log = structlog.get_logger("access")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which calls have a record; those that failed always have one."""

    rate: float = 1.0
    """Part of the others that has one."""
    slow_ns: int = 1_000_000_000
    """Calls that took so long have one too."""


class Entry(NamedTuple):
    """A call that has ended, as it waits to be written."""

    record: CallRecord
    ended: int
    """Read from the clock of the engine, as the other times."""
    at: int
    """The same since the epoch."""
    operation: str
    id: str
    model: str
    version: str
    principal: str | None
    peer: Peer
    status: str
    error: str | None
    queue_ns: int | None
    execute_ns: int | None
    batch: int | None


class Line(msgspec.Struct, omit_defaults=True):
    """A line of the log."""

    time: str
    operation: str
    status: str
    peer: str
    listener: str
    total_us: int
    bytes_in: int
    bytes_out: int | None = None
    """None where no answer was written."""
    id: str = ""
    model: str = ""
    version: str = ""
    principal: str | None = None
    queue_us: int | None = None
    execute_us: int | None = None
    batch: int | None = None
    """Rows of the execution that it was answered from, with those of other calls."""
    error: str | None = None


class AccessLog:
    """Observes calls, and has records of them written."""

    def __init__(
        self,
        file: AccessFile,
        status_of: StatusOf,
        sampling: Sampling,
        max_pending: int,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        now: Callable[[], int] = time.time_ns,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """At most `max_pending` records may wait to be written."""
        self._file = file
        self._status_of = status_of
        self._rate = sampling.rate
        self._slow_ns = sampling.slow_ns
        self._clock = clock
        self._now = now
        self._chance = chance
        self._max_pending = max_pending
        self._pending: list[Entry] = []
        self._thread = BatchThread[Entry | int]("access-log", self._write, max_pending)
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = 0
        self._unwritten = 0
        """Records that the file did not take; counted by the thread alone."""
        self._untold = 0
        """Those of them that no line of the log names yet."""
        self._told_at = -_TOLD_SECONDS
        self._told = 0

    @property
    def dropped(self) -> int:
        """Return how many records were dropped since the start, or could not be written."""
        return self._dropped + self._unwritten

    # --- on the event loop ---

    def began(self, call: Call) -> None:
        """Note when a call began."""
        if call.record is None:
            call.record = CallRecord(self._clock())

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        """Have those of the calls written that the rule picks."""
        now = self._clock()
        error = outcome if isinstance(outcome, BaseException) else None
        for call in calls:
            record = call.record
            if record is None or call.parent is not None:
                continue  # it began before, or is a part of a call that has a record
            if (
                error is not None
                or record.status >= _ERROR_STATUS
                or now - record.begun_ns >= self._slow_ns
                or self._rate >= 1.0
                or self._chance() < self._rate
            ):
                self._keep(call, record, now, outcome)

    def _keep(self, call: Call, record: CallRecord, now: int, outcome: Outcome) -> None:
        if len(self._pending) >= self._max_pending:
            self._drop(1)
            return
        request_id, version, queue_ns, execute_ns, batch = "", call.version, None, None, None
        if isinstance(call, InferCall):
            request_id = call.id
            if call.is_found:
                version = call.found.number
            if type(outcome) is Executed:
                queue_ns = outcome.begun_ns - (call.submitted_ns or call.started_ns)
                execute_ns = outcome.ended_ns - outcome.begun_ns
                batch = outcome.rows or call.rows
        peer, model, error, text = call.peer, call.model, None, None
        if isinstance(outcome, BaseException):
            error, text = outcome, _text_of(outcome)
        principal = call.principal
        self._pending.append(
            Entry(
                record,
                now,
                self._now(),
                call.operation.value,
                request_id if len(request_id) <= _MAX_NAME else _shortened(request_id, _MAX_NAME),
                model if len(model) <= _MAX_NAME else _shortened(model, _MAX_NAME),
                version if len(version) <= _MAX_NAME else _shortened(version, _MAX_NAME),
                None if principal is None else principal.name[:_MAX_NAME],
                peer,
                self._status_of(error, peer.listener, record.status),
                text,
                queue_ns,
                execute_ns,
                batch,
            )
        )
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FLUSH_SECONDS, self._flush, context=outside_call())

    def _flush(self) -> None:
        """Hand over what was written to its client, and what need not wait for that any longer."""
        self._timer = None
        due = self._clock() - int(_WRITTEN_SECONDS * 1e9)
        waiting: list[Entry] = []
        ready: list[Entry] = []
        for entry in self._pending:
            is_early = entry.record.bytes_out < 0 and entry.error is None and entry.ended > due
            (waiting if is_early else ready).append(entry)
        self._hand_over(ready)
        self._pending = waiting
        if waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FLUSH_SECONDS, self._flush, context=outside_call())
        self._warn()

    def _hand_over(self, entries: list[Entry]) -> None:
        free = max(0, self._thread.free)
        if len(entries) > free:
            self._drop(len(entries) - free)
            entries = entries[:free]
        untold, self._untold = self._untold, 0
        if untold and entries:
            self._thread.put([untold])
        elif untold:
            self._untold = untold
        for start in range(0, len(entries), _BATCH):
            self._thread.put(entries[start : start + _BATCH])

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._untold += count

    def _warn(self) -> None:
        now, dropped = time.monotonic(), self.dropped
        if dropped > self._told and now - self._told_at >= _TOLD_SECONDS:
            _log.warning("access records were dropped", count=dropped - self._told)
            self._told_at, self._told = now, dropped

    def reopen(self) -> None:
        """Have the file opened by its name again, as rotation of logs asks for it."""
        self._thread.call(self._reopen)

    async def close(self, in_thread: InThread) -> None:
        """Write what is pending, and wait for that a bounded time; `in_thread` runs the wait."""
        if self._timer is not None:
            self._timer.cancel()
        self._hand_over(self._pending)
        self._pending = []
        if await in_thread(partial(self._thread.close, _CLOSING_SECONDS)):
            self._file.close()
        else:
            _log.warning("access records were not all written", reason="the file takes none")
        self._told_at = -_TOLD_SECONDS
        self._warn()

    # --- in the thread ---

    def _write(self, entries: Sequence[Entry | int]) -> None:
        self._file.look()
        lines = []
        for entry in entries:
            if isinstance(entry, int):
                told = {"time": _iso(self._now()), "dropped": entry}
                lines.append(json.dumps(told).encode() + b"\n")
            else:
                lines.append(written(entry) + b"\n")
        if self._file.takes_all:
            lines = [b"".join(lines)]
        for line in lines:
            if not self._file.write(line):
                self._unwritten += line.count(b"\n")

    def _reopen(self) -> None:
        try:
            self._file.reopen()
        except OSError as error:
            _log.warning("the access log could not be opened again", reason=str(error))


_encoder = msgspec.json.Encoder()


def written(entry: Entry) -> bytes:
    """Return the line of an entry: ASCII, without control characters, of a bounded length."""
    record, peer = entry.record, entry.peer
    line = Line(
        _iso(entry.at),
        entry.operation,
        entry.status,
        peer.address,
        peer.listener,
        (max(entry.ended, record.written_ns) - record.begun_ns) // 1000,
        record.bytes_in,
        record.bytes_out if record.bytes_out >= 0 else None,
        entry.id,
        entry.model,
        entry.version,
        entry.principal,
        None if entry.queue_ns is None else entry.queue_ns // 1000,
        None if entry.execute_ns is None else entry.execute_ns // 1000,
        entry.batch,
        entry.error,
    )
    try:
        data = _encoder.encode(line)
    except UnicodeEncodeError:
        data = b"\xff"  # a surrogate, which stands for a byte that is not UTF-8
    if data.isascii() and b"\x7f" not in data and len(data) <= MAX_RECORD_BYTES:
        return data
    return _escaped(msgspec.structs.asdict(line))


def _escaped(line: Mapping[str, object]) -> bytes:
    """Write a line in ASCII: no character of a client then moves a cursor or ends a record."""
    most = _MAX_ERROR
    shown = {name: value for name, value in line.items() if value not in (None, "")}
    while len(data := json.dumps(shown).encode()) > MAX_RECORD_BYTES:
        most //= 2
        shown = {
            name: _shortened(value, most) if isinstance(value, str) and len(value) > most else value
            for name, value in shown.items()
        }
    return data


def _shortened(text: str, most: int) -> str:
    return f"{text[:most]}..."


def _text_of(error: BaseException) -> str:
    kind = type(error).__name__
    text = str(error)[:_MAX_ERROR]
    return f"{kind}: {text}" if text else kind


@lru_cache(maxsize=8)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _iso(ns: int) -> str:
    seconds, rest = divmod(ns, 1_000_000_000)
    return f"{_second(seconds)}.{rest // 1000:06d}Z"
