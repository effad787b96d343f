"""The ledger of memory held for clients, and the account of each connection.

Three rules keep it within its limit, fair, and free of deadlocks.

A fair share: what a connection holds, with what it asks for, may be at most F * F / limit, where F
is what all others leave of the limit; and at most three quarters of the limit. Alone it gets those
three quarters; of many that want all they can get each gets about the same, and something is left
for one more. The larger a holder is, the earlier it is refused.

No deadlock: only what holds next to nothing may wait (a request whose body or message is yet to
come); what holds something (and is to be inflated, parsed, or answered) gets more at once or is
refused. Those who wait hold an eighth of the limit at most, all together; else a request is refused
instead. Everything else is released by those who do not wait, whatever others do. Then F is seven
eighths of the limit at least, and its share, 49/64, more than the three quarters that are the most
anybody asks for: the first in the queue is served.

No starvation: the queue is FIFO, and only small reservations may pass it.
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from xlaserve.errors import BudgetExhausted

_PASSING_PART = 64
"""The part of the limit below which a request passes those who wait."""
_WAITING_PART = 8
"""Share of the limit for waiting requests."""


class Kind(IntEnum):
    """Purposes of held bytes."""

    REQUESTS = 0
    """Messages and bodies: as they come, inflated, parsed, and decoded."""
    ANSWERS = 1
    """Answers that their client has not read."""
    AHEAD = 2
    """Bytes received ahead of need: pipelined requests, and header blocks in progress."""
    CACHED = 3
    """Cached answers, evicted under pressure."""


class Ledger:
    """Bytes held for all connections together, up to a limit. Of the event loop alone."""

    __slots__ = (
        "_kinds",
        "_on_pressure",
        "_waiting",
        "_waiting_bytes",
        "held",
        "high",
        "is_pressed",
        "limit",
        "low",
        "most",
        "peak",
        "pressures",
        "refused",
        "spare",
        "waited",
    )

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.most = limit - limit // 4
        """The most that one connection may hold."""
        self.high = limit - limit // 4
        """The watermark at which pressure begins."""
        self.low = limit // 2
        """The watermark at which it ends."""
        self.spare = limit // 8
        """Bytes that may be kept for the next message, beside those that are held: with these up
        to the watermark it is within the limit, and beyond that it is given back."""
        self.held = 0
        self.is_pressed = False
        """Whether there is pressure, or somebody waits: fast paths then leave the decision to
        the general ones."""
        self.pressures = 0
        """Number of pressures begun."""
        self.peak = 0
        """The most that was held since this was set back; short messages do not move it."""
        self.refused = 0
        """Requests and answers that were refused for want of memory."""
        self.waited = 0
        """Requests that had to wait for memory."""
        self._kinds = [0] * len(Kind)
        """Bytes by kind; REQUESTS has the rest of `held`, and is counted at no cost."""
        self._waiting: deque[Wait] = deque()
        self._waiting_bytes = 0
        self._on_pressure: list[Callable[[], None]] = []

    def open(self) -> "Account":
        """Return the account of a new connection."""
        return Account(self)

    def on_pressure(self, call: Callable[[], None]) -> None:
        """Register a callback for the begin of memory pressure, which may release memory."""
        self._on_pressure.append(call)

    def held_for(self, kind: Kind) -> int:
        """Return the number of bytes held for a purpose."""
        return self.held - sum(self._kinds) if kind is Kind.REQUESTS else self._kinds[kind]

    @property
    def waiting(self) -> int:
        """Return the number of requests waiting for memory."""
        return len(self._waiting)

    # --- as accounts call it ---

    def count(self, kind: Kind, change: int) -> None:
        """Count bytes for a kind other than REQUESTS; they are in `held` already."""
        self._kinds[kind] += change

    def press(self) -> None:
        """Enter pressure, unless already under it."""
        if not self.is_pressed:
            self.is_pressed = True
            self.pressures += 1
            for call in self._on_pressure:
                call()

    def relieve(self) -> None:
        """Serve waiting requests while there is memory; leave pressure below `low`."""
        waiting = self._waiting
        while waiting and waiting[0].account.admits(waiting[0].count):
            waiting[0].grant()
        if not waiting and self.held <= self.low:
            self.is_pressed = False

    def may_wait(self, account: "Account", count: int) -> bool:
        """Tell whether a request of an account may wait for this many bytes."""
        held = self._waiting_bytes + account.held
        return held * _WAITING_PART <= self.limit and account.held + count <= self.most

    def is_behind(self, count: int) -> bool:
        """Tell whether this many bytes must queue after waiting requests."""
        return bool(self._waiting) and count * _PASSING_PART > self.limit

    def enqueue(self, wait: "Wait") -> None:
        """Queue a request."""
        self.waited += 1
        self._waiting.append(wait)
        self._waiting_bytes += wait.held
        self.press()

    def dequeue(self, wait: "Wait") -> None:
        """Take a request out of the queue."""
        self._waiting.remove(wait)
        self._waiting_bytes -= wait.held


class Account:
    """Bytes of one connection."""

    __slots__ = ("_kinds", "held", "ledger")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.held = 0
        self._kinds = [0] * len(Kind)

    def held_for(self, kind: Kind) -> int:
        """Return the number of bytes held for a purpose."""
        return self.held - sum(self._kinds) if kind is Kind.REQUESTS else self._kinds[kind]

    def hold(self, count: int, kind: Kind = Kind.REQUESTS) -> None:
        """Charge bytes that are already in memory."""
        ledger = self.ledger
        self.held += count
        ledger.held += count
        if kind:
            self._kinds[kind] += count
            ledger.count(kind, count)
            ledger.peak = max(ledger.peak, ledger.held)
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
        """Tell whether this many more bytes are within the limit and the connection's share."""
        ledger = self.ledger
        wanted = self.held + count
        left = ledger.limit - ledger.held + self.held
        return left >= 0 and wanted <= ledger.most and wanted * ledger.limit <= left * left

    def allows(self, count: int) -> bool:
        """Tell whether more bytes are allowed, counting refusals."""
        if self.admits(count) and not self.ledger.is_behind(count):
            return True
        self.ledger.refused += 1
        return False

    def reserve(self, count: int, kind: Kind = Kind.REQUESTS) -> bool:
        """Reserve bytes ahead; returns false, without effect, if there is no memory.

        A request that is refused then may not wait: it holds something, or its transport cannot.
        """
        if not self.allows(count):
            return False
        self.hold(count, kind)
        self.ledger.peak = max(self.ledger.peak, self.ledger.held)
        return True

    def take(self, what: str, count: int) -> None:
        """Reserve bytes ahead; raises BudgetExhausted."""
        if not self.reserve(count):
            raise self.refusal(what, count)

    def refusal(self, what: str, count: int) -> BudgetExhausted:
        """Return the error of something without memory."""
        return BudgetExhausted(what, count, self.ledger.limit)

    def spare(self, count: int) -> bool:
        """Count bytes that one can do without; false, and no refusal, where there is no memory."""
        if not self.admits(count) or self.ledger.is_behind(count):
            return False
        self.hold(count)
        self.ledger.peak = max(self.ledger.peak, self.ledger.held)
        return True

    def wait(self, count: int, granted: Callable[[], None]) -> "Wait | None":
        """Wait for bytes that are to come, which are held when `granted` is called.

        None, and the request is refused, where it may not wait.
        """
        if not self.ledger.may_wait(self, count):
            self.ledger.refused += 1
            return None
        wait = Wait(self, count, granted)
        self.ledger.enqueue(wait)
        return wait

    def close(self) -> None:
        """Release everything: the connection is closed.

        Later releases, by holders that do not know of it, are counted nowhere.
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
    """A request that waits for memory."""

    __slots__ = ("_granted", "_ledger", "account", "count", "held")

    def __init__(self, account: Account, count: int, granted: Callable[[], None]) -> None:
        self.account = account
        self.count = count
        self.held = account.held
        """Bytes of its connection when it began to wait."""
        self._ledger = account.ledger
        self._granted: Callable[[], None] | None = granted

    def grant(self) -> None:
        """Hold the bytes, and call the callback."""
        granted, self._granted = self._granted, None
        assert granted is not None
        self._ledger.dequeue(self)
        self.account.hold(self.count)
        self._ledger.peak = max(self._ledger.peak, self._ledger.held)
        granted()

    def cancel(self) -> None:
        """Wait no longer; nothing changes where the bytes are held already."""
        if self._granted is not None:
            self._granted = None
            self._ledger.dequeue(self)
            self._ledger.relieve()
