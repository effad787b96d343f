"""Accounts for the memory held for clients, per connection and with a global limit.

Three rules make it fair and free of deadlocks and starvation.

Fair share: the bytes of a connection, including a new reservation, may be at most F * F / limit,
where F is the limit minus the bytes of all other connections; and at most three quarters of the
limit. A single connection can get three quarters. Many greedy connections get about equal shares,
with some memory left for one more. The more a connection holds, the earlier it is refused.

No deadlock: only a request that holds almost nothing, because its body or message has not arrived,
may wait for memory. A request that holds memory, and is to be inflated, parsed or answered, gets
more immediately or is refused. Waiting requests hold at most an eighth of the limit in total;
beyond that, a request is refused instead of queued. All other memory is eventually released by
requests that do not wait. F is then at least seven eighths of the limit, and the share 49/64 of it,
which is more than the three quarters that a request may ask for, so the first in the queue is
served.

No starvation: the queue is FIFO, and only small reservations may bypass it.
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from xlaserve.errors import BudgetExhausted

_PASSING_PART = 64
"""Reservations up to 1/64 of the limit bypass the queue of waiting requests."""
_WAITING_PART = 8
"""Waiting requests may hold up to 1/8 of the limit in total."""


class Kind(IntEnum):
    """The purposes for which bytes are held."""

    REQUESTS = 0
    """Request messages and bodies: received, inflated, parsed or decoded."""
    ANSWERS = 1
    """Answers that the client has not read."""
    AHEAD = 2
    """Bytes received before they can be handled: pipelined requests, incomplete header blocks."""
    CACHED = 3
    """Cached answers, evicted under pressure."""


class Ledger:
    """Counts the bytes held for all connections. Used on the event loop's thread only."""

    __slots__ = (
        "_kinds",
        "_on_pressure",
        "_peaks",
        "_waiting",
        "_waiting_bytes",
        "held",
        "high",
        "is_pressed",
        "limit",
        "low",
        "most",
        "pressures",
        "refused",
        "spare",
        "waited",
    )

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.most = limit - limit // 4
        """Maximum bytes of one connection."""
        self.high = limit - limit // 4
        """High watermark: memory pressure begins above it."""
        self.low = limit // 2
        """Low watermark: memory pressure ends at or below it."""
        self.spare = limit // 8
        """Bytes of free buffers that may be kept for reuse in addition to `held`. Up to the high
        watermark, the sum is within the limit; under pressure, free buffers are dropped."""
        self.held = 0
        self.is_pressed = False
        """Whether there is memory pressure or a request is waiting; fast paths are then skipped."""
        self.pressures = 0
        """Number of times that memory pressure has begun."""
        self.refused = 0
        """Number of requests and answers refused for lack of memory."""
        self.waited = 0
        """Number of requests that had to wait for memory."""
        self._kinds = [0] * len(Kind)
        """Bytes held by kind, except REQUESTS, which is the rest of `held` (faster to count)."""
        self._waiting: deque[Wait] = deque()
        self._waiting_bytes = 0
        self._on_pressure: list[Callable[[], None]] = []
        self._peaks: list[Peak] = []

    def open(self) -> "Account":
        """Create an account for a new connection."""
        return Account(self)

    def on_pressure(self, call: Callable[[], None]) -> None:
        """Register a callback for the start of memory pressure; it may release memory."""
        self._on_pressure.append(call)

    def watch(self) -> "Peak":
        """Record peaks of `held` for one more reader, for as long as the ledger exists."""
        peak = Peak(self)
        self._peaks.append(peak)
        return peak

    def held_for(self, kind: Kind) -> int:
        """Return the number of bytes held for a purpose."""
        return self.held - sum(self._kinds) if kind is Kind.REQUESTS else self._kinds[kind]

    @property
    def waiting(self) -> int:
        """Return the number of requests waiting for memory."""
        return len(self._waiting)

    # --- interface for accounts ---

    def count(self, kind: Kind, change: int) -> None:
        """Add bytes to a kind other than REQUESTS; the caller updates `held`."""
        self._kinds[kind] += change

    def rise(self) -> None:
        """Record `held` as the peak of each reader, if it is; not called for short messages."""
        for peak in self._peaks:
            peak.most = max(peak.most, self.held)

    def press(self) -> None:
        """Enter memory pressure, and call the callbacks, unless already under pressure."""
        if not self.is_pressed:
            self.is_pressed = True
            self.pressures += 1
            for call in self._on_pressure:
                call()

    def relieve(self) -> None:
        """Grant memory to waiting requests, in order.

        Ends memory pressure if no request is left waiting and `held` is at or below `low`.
        """
        waiting = self._waiting
        while waiting and waiting[0].account.admits(waiting[0].count):
            waiting[0].grant()
        if not waiting and self.held <= self.low:
            self.is_pressed = False

    def may_wait(self, account: "Account", count: int) -> bool:
        """Tell whether a request of `account` may wait for `count` bytes."""
        held = self._waiting_bytes + account.held
        return held * _WAITING_PART <= self.limit and account.held + count <= self.most

    def is_behind(self, count: int) -> bool:
        """Tell whether a reservation of `count` bytes must not bypass waiting requests."""
        return bool(self._waiting) and count * _PASSING_PART > self.limit

    def enqueue(self, wait: "Wait") -> None:
        """Append a waiting request to the queue."""
        self.waited += 1
        self._waiting.append(wait)
        self._waiting_bytes += wait.held
        self.press()

    def dequeue(self, wait: "Wait") -> None:
        """Remove a waiting request from the queue."""
        self._waiting.remove(wait)
        self._waiting_bytes -= wait.held


class Peak:
    """The maximum of the bytes held since its only reader last asked."""

    __slots__ = ("_ledger", "most")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.most = ledger.held

    def take(self) -> int:
        """Return the maximum since the last call; short messages do not count."""
        most, self.most = self.most, self._ledger.held
        return most


class Account:
    """The bytes held for one connection."""

    __slots__ = ("_kinds", "held", "ledger")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.held = 0
        self._kinds = [0] * len(Kind)

    def held_for(self, kind: Kind) -> int:
        """Return the number of bytes held for a purpose."""
        return self.held - sum(self._kinds) if kind is Kind.REQUESTS else self._kinds[kind]

    def hold(self, count: int, kind: Kind = Kind.REQUESTS) -> None:
        """Add bytes that are already in memory, without checking limits."""
        ledger = self.ledger
        self.held += count
        ledger.held += count
        if kind:
            self._kinds[kind] += count
            ledger.count(kind, count)
            ledger.rise()
        if ledger.held > ledger.high:
            ledger.press()

    def release(self, count: int, kind: Kind = Kind.REQUESTS) -> None:
        """Release bytes."""
        ledger = self.ledger
        self.held -= count
        ledger.held -= count
        if kind:
            self._kinds[kind] -= count
            ledger.count(kind, -count)
        if ledger.is_pressed:
            ledger.relieve()

    def release_all(self, kind: Kind) -> None:
        """Release all bytes held for a purpose."""
        count = self._kinds[kind] if kind else self.held_for(kind)
        if count:
            self.release(count, kind)

    def admits(self, count: int) -> bool:
        """Tell whether `count` more bytes are within the limit and the connection's fair share."""
        ledger = self.ledger
        wanted = self.held + count
        left = ledger.limit - ledger.held + self.held
        return left >= 0 and wanted <= ledger.most and wanted * ledger.limit <= left * left

    def allows(self, count: int) -> bool:
        """Tell whether `count` more bytes may be reserved; count a refusal if not."""
        if self.admits(count) and not self.ledger.is_behind(count):
            return True
        self.ledger.refused += 1
        return False

    def reserve(self, count: int, kind: Kind = Kind.REQUESTS) -> bool:
        """Reserve bytes before they are allocated; return false, with no effect, if refused.

        For requests that must not wait, because they hold memory already.
        """
        if not self.allows(count):
            return False
        self.hold(count, kind)
        self.ledger.rise()
        return True

    def take(self, what: str, count: int) -> None:
        """Reserve bytes as `reserve` does, but raise BudgetExhausted if refused."""
        if not self.reserve(count):
            raise self.refusal(what, count)

    def refusal(self, what: str, count: int) -> BudgetExhausted:
        """Return the error for refused bytes; `what` names their use."""
        return BudgetExhausted(what, count, self.ledger.limit)

    def spare(self, count: int) -> bool:
        """Reserve bytes for an optional use; if refused, return false and count no refusal."""
        if not self.admits(count) or self.ledger.is_behind(count):
            return False
        self.hold(count)
        self.ledger.rise()
        return True

    def wait(self, count: int, granted: Callable[[], None]) -> "Wait | None":
        """Queue a request for `count` bytes; they are held when `granted` is called.

        Return None, and count a refusal, if the request may not wait.
        """
        if not self.ledger.may_wait(self, count):
            self.ledger.refused += 1
            return None
        wait = Wait(self, count, granted)
        self.ledger.enqueue(wait)
        return wait

    def close(self) -> None:
        """Release all bytes: the connection is closed.

        Later releases by users of the account do not affect the ledger.
        """
        ledger, self.ledger = self.ledger, Ledger(self.ledger.limit)
        for kind in Kind:
            count = self.held_for(kind)
            if kind:
                ledger.count(kind, -count)
                self.ledger.count(kind, count)
        ledger.held -= self.held
        self.ledger.held = self.held
        if ledger.is_pressed:
            ledger.relieve()


class Wait:
    """A request waiting for memory."""

    __slots__ = ("_granted", "_ledger", "account", "count", "held")

    def __init__(self, account: Account, count: int, granted: Callable[[], None]) -> None:
        self.account = account
        self.count = count
        self.held = account.held
        """Bytes held by the connection when the request was queued."""
        self._ledger = account.ledger
        self._granted: Callable[[], None] | None = granted

    def grant(self) -> None:
        """Remove the request from the queue, hold its bytes, and call the callback."""
        granted, self._granted = self._granted, None
        assert granted is not None
        self._ledger.dequeue(self)
        self.account.hold(self.count)
        self._ledger.rise()
        granted()

    def cancel(self) -> None:
        """Remove the request from the queue; no effect if its bytes were granted."""
        if self._granted is not None:
            self._granted = None
            self._ledger.dequeue(self)
            self._ledger.relieve()
