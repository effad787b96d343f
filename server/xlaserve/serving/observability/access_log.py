"""The access log: a record of each sampled client call, written off the request path.

As an observer it queues entries, which are formatted shortly afterwards on the event loop; a thread
writes them. Formatting on the thread would be slower because of GIL contention. Nothing ever waits:
if the queue is full, records are dropped, and the log reports their number.
"""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import structlog

from xlaserve.concurrency.batches import BatchThread
from xlaserve.serving.call import Call, Outcome, outside_call
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.infer_call import Executed, InferCall
from xlaserve.serving.observability.access_file import AccessFile
from xlaserve.serving.observability.access_lines import (
    MAX_NAME,
    Entry,
    ExecutedEntry,
    Lines,
    StatusOf,
    shortened,
    text_of,
)

_FLUSH_SECONDS = 0.05
_WRITTEN_SECONDS = 5.0
"""How long a record waits for the byte count of an answer that is still being written."""
_BATCH = 128
"""Number of lines formatted per iteration: about 50 us, and 2 ms in the worst case.

Formatting starts as soon as this many are queued, while their data is in the CPU cache: 50 ms later
it takes four times as long.
"""
_CLOSING_SECONDS = 2.0
_REPORT_SECONDS = 10.0
"""Minimum interval between warnings about dropped records."""
_ERROR_STATUS = 400

InThread: TypeAlias = Callable[[Callable[[], bool]], Awaitable[bool]]

_log = structlog.get_logger("access")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which calls are logged; failed calls always are."""

    rate: float = 1.0
    """Fraction of the remaining calls that are logged.

    The number of calls to skip is drawn at random, so a random number is needed per record, not per
    call.
    """
    slow_ns: int = 1_000_000_000
    """Calls slower than this are always logged."""


class AccessLog:
    """Observer that logs calls."""

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
        """`max_pending` limits the queued records."""
        self._file = file
        self._status_of = status_of
        self._rate = sampling.rate
        self._slow_ns = sampling.slow_ns
        self._clock = clock
        self._chance = chance
        self._left_out: float = self._next_gap()
        """Number of calls to skip before the next sampled one."""
        self._max_pending = max_pending
        self._pending: list[Entry | ExecutedEntry] = []
        self._lines = Lines(status_of, clock, now)
        self._made: list[bytes] = []
        """Formatted lines, ready to be written."""
        self._made_count = 0
        self._thread = BatchThread[bytes]("access-log", self._write, max_pending)
        self._timer: asyncio.TimerHandle | None = None
        self._dropped = 0
        self._unwritten = 0
        """Records that could not be written; counted by the thread."""
        self._unreported = 0
        """Dropped records not yet reported by a line in the file."""
        self._reported_at = -_REPORT_SECONDS
        self._reported = 0

    @property
    def dropped(self) -> int:
        """Return the number of records dropped or unwritten since the start."""
        return self._dropped + self._unwritten

    # --- on the event loop ---

    began = None
    """No callback is needed: the gates create the records of calls, and transports
    complete them.
    """

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        """Queue the sampled calls among those ended."""
        if type(outcome) is not Executed:
            self._ended_otherwise(calls, outcome)
            return
        begun, ended, rows = outcome.begun_ns, outcome.ended_ns, outcome.rows
        takes_all, pending = self._rate >= 1.0, self._pending
        call: InferCall
        for call in calls:  # type: ignore[assignment]
            record = call.record
            if record is None or call.parent is not None:
                continue
            if not (takes_all or ended - record.begun_ns >= self._slow_ns or self._is_drawn()):
                continue
            waiting = len(pending)
            if waiting >= self._max_pending:
                self._drop(1)
                continue
            # Store neither the call nor its answer, because they hold tensors.
            pending.append(
                ExecutedEntry(
                    record,
                    call.found,
                    call.peer,
                    call.principal,
                    shortened(call.id) if call.id else "",
                    call.submitted_ns or call.started_ns,
                    begun,
                    ended,
                    rows or call.rows,
                )
            )
            if not waiting:
                self._await_flush()
            elif waiting == _BATCH - 1:
                # Run after this iteration of the event loop, in which the answers are written.
                asyncio.get_running_loop().call_soon(self._make_some, context=outside_call())

    def _ended_otherwise(self, calls: Sequence[Call], outcome: Outcome) -> None:
        now = self._clock()
        error = outcome if isinstance(outcome, BaseException) else None
        for call in calls:
            record = call.record
            if record is None or call.parent is not None:
                continue  # began before the log was enabled, or is a nested call
            if (
                error is not None
                or record.status >= _ERROR_STATUS
                or now - record.begun_ns >= self._slow_ns
                or self._is_drawn()
            ):
                self._keep(call, record, now, error)

    def _is_drawn(self) -> bool:
        if self._left_out:
            self._left_out -= 1
            return False
        self._left_out = self._next_gap()
        return True

    def _next_gap(self) -> float:
        """Return the number of calls to skip (geometric distribution)."""
        if self._rate >= 1.0:
            return 0
        if self._rate <= 0.0:
            return math.inf
        return math.floor(math.log(1.0 - self._chance()) / math.log1p(-self._rate))

    def _keep(self, call: Call, record: CallRecord, now: int, error: BaseException | None) -> None:
        if len(self._pending) >= self._max_pending:
            self._drop(1)
            return
        request_id, version = "", call.version
        if isinstance(call, InferCall):
            request_id = call.id
            if call.is_found:
                version = call.found.number
        principal, peer = call.principal, call.peer
        self._pending.append(
            Entry(
                record,
                now,
                call.operation.value,
                shortened(request_id),
                shortened(call.model),
                shortened(version),
                None if principal is None else principal.name[:MAX_NAME],
                peer,
                self._status_of(error, peer.listener, record.status),
                None if error is None else text_of(error),
            )
        )
        if len(self._pending) == 1:
            self._await_flush()

    def _await_flush(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_FLUSH_SECONDS, self._flush, context=outside_call())

    def _flush(self) -> None:
        """Format and hand over entries, except those whose answers are still being written."""
        self._timer = None
        if self._make_some():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(0, self._flush, context=outside_call())
            return
        self._hand_over()
        if self._pending:
            self._await_flush()
        self._warn()

    def _make_some(self) -> bool:
        """Format the next entries; return whether more are queued."""
        ready, rest = self._pending[:_BATCH], self._pending[_BATCH:]
        self._pending = rest
        # A list comprehension takes half the time of a generator here.
        if any([entry.record.bytes_out < 0 for entry in ready]):  # noqa: C419
            due = self._clock() - int(_WRITTEN_SECONDS * 1e9)
            self._pending = rest + [entry for entry in ready if _is_early(entry, due)]
            ready = [entry for entry in ready if not _is_early(entry, due)]
        self._make(ready)
        return bool(rest)

    def _make(self, entries: list[Entry | ExecutedEntry]) -> None:
        free = max(0, self._thread.free - self._made_count)
        if len(entries) > free:
            self._drop(len(entries) - free)
            entries = entries[:free]
        if not entries:
            return
        if self._unreported:
            self._made.append(self._lines.of_dropped(self._unreported))
            self._unreported = 0
        self._made.append(self._lines.of(entries))
        self._made_count += len(entries)

    def _hand_over(self) -> None:
        if self._made:
            self._thread.put([b"".join(self._made)], self._made_count)
            self._made, self._made_count = [], 0

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._unreported += count

    def _warn(self) -> None:
        now, dropped = time.monotonic(), self.dropped
        if dropped > self._reported and now - self._reported_at >= _REPORT_SECONDS:
            _log.warning("access records dropped", count=dropped - self._reported)
            self._reported_at, self._reported = now, dropped

    def reopen(self) -> None:
        """Reopen the file by name, after log rotation."""
        self._thread.call(self._reopen)

    async def close(self, in_thread: InThread) -> None:
        """Write pending records within a time limit; `in_thread` runs a blocking function."""
        if self._timer is not None:
            self._timer.cancel()
        self._make(self._pending)
        self._pending = []
        self._hand_over()
        if await in_thread(partial(self._thread.close, _CLOSING_SECONDS)):
            self._file.close()
        else:
            _log.warning("access records not written", reason="the file could not be written")
        self._reported_at = -_REPORT_SECONDS
        self._warn()

    # --- on the thread ---

    def _write(self, blocks: Sequence[bytes]) -> None:
        self._file.check_rotation()
        for block in blocks:
            for part in self._file.parts(block):
                if not self._file.write(part):
                    self._unwritten += part.count(b"\n")

    def _reopen(self) -> None:
        try:
            self._file.reopen()
        except OSError as error:
            _log.warning("access log not reopened", reason=str(error))


def _is_early(entry: Entry | ExecutedEntry, due: int) -> bool:
    """Tell whether the answer may still be unwritten, so that the record must wait."""
    return entry.record.bytes_out < 0 and entry.error is None and entry.ended_ns > due
