"""The access log: a sampled record of each client call, written off the request path.

An observer of calls makes entries, and lines of JSON of them a moment later, both on the event
loop; a thread writes the lines. To make them there too would cost more: threads that compute take
the interpreter from one another. Nothing of it waits: what does not fit into the queue is dropped,
and the log says how many were.
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
"""Seconds within which the bytes of an answer are waited for: large ones are written later."""
_BATCH = 128
"""Lines that are made in one pass of the event loop: some 50 us, and 2 ms of the most hostile.

So many are made at once, while their calls are in the caches of the processor: 50 ms later it takes
four times as long.
"""
_CLOSING_SECONDS = 2.0
_TOLD_SECONDS = 10.0
"""Seconds between two warnings of the log that records were dropped."""
_ERROR_STATUS = 400

InThread: TypeAlias = Callable[[Callable[[], bool]], Awaitable[bool]]

_log = structlog.get_logger("access")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of calls for the log; failed calls are always logged."""

    rate: float = 1.0
    """Part of the others that has one.

    Chance decides how many are left out before the next that has one, so that a random number is
    drawn for each record and not for each call.
    """
    slow_ns: int = 1_000_000_000
    """Slower calls are always logged."""


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
        """At most `max_pending` records are queued."""
        self._file = file
        self._status_of = status_of
        self._rate = sampling.rate
        self._slow_ns = sampling.slow_ns
        self._clock = clock
        self._chance = chance
        self._left_out: float = self._next_gap()
        """Unlogged calls before the next sampled one."""
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
        """Records that the file did not take; counted by the thread alone."""
        self._untold = 0
        """Dropped records that no line of the log reports yet."""
        self._told_at = -_TOLD_SECONDS
        self._told = 0

    @property
    def dropped(self) -> int:
        """Return how many records were dropped since the start, or could not be written."""
        return self._dropped + self._unwritten

    # --- on the event loop ---

    began = None
    """The gates make the records of calls, and transports complete them."""

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        """Have those of the calls written that the rule picks."""
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
            # Not the call itself, nor what it was answered with: these hold tensors.
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
                # Behind this pass, in which their answers are written.
                asyncio.get_running_loop().call_soon(self._make_some, context=outside_call())

    def _ended_otherwise(self, calls: Sequence[Call], outcome: Outcome) -> None:
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
        """Return the number of calls to skip, geometrically distributed."""
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
        """Hand over lines whose answers were written, or need not wait for that."""
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
        """Format the next entries; tell whether more are queued."""
        ready, rest = self._pending[:_BATCH], self._pending[_BATCH:]
        self._pending = rest
        # A list is made in half the time of a generator.
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
        if self._untold:
            self._made.append(self._lines.of_dropped(self._untold))
            self._untold = 0
        self._made.append(self._lines.of(entries))
        self._made_count += len(entries)

    def _hand_over(self) -> None:
        if self._made:
            self._thread.put([b"".join(self._made)], self._made_count)
            self._made, self._made_count = [], 0

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._untold += count

    def _warn(self) -> None:
        now, dropped = time.monotonic(), self.dropped
        if dropped > self._told and now - self._told_at >= _TOLD_SECONDS:
            _log.warning("access records dropped", count=dropped - self._told)
            self._told_at, self._told = now, dropped

    def reopen(self) -> None:
        """Reopen the file by its name, after log rotation."""
        self._thread.call(self._reopen)

    async def close(self, in_thread: InThread) -> None:
        """Write pending records within a time limit; `in_thread` runs the wait."""
        if self._timer is not None:
            self._timer.cancel()
        self._make(self._pending)
        self._pending = []
        self._hand_over()
        if await in_thread(partial(self._thread.close, _CLOSING_SECONDS)):
            self._file.close()
        else:
            _log.warning("access records not written", reason="the file could not be written")
        self._told_at = -_TOLD_SECONDS
        self._warn()

    # --- in the thread ---

    def _write(self, blocks: Sequence[bytes]) -> None:
        self._file.look()
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
    """Tell whether a call's answer may still be unwritten, so that its record waits."""
    return entry.record.bytes_out < 0 and entry.error is None and entry.ended_ns > due
