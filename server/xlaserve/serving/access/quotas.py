"""Per-principal quotas: request rate and concurrency."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from xlaserve.errors.access import QuotaExceeded
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.access.rules import Quota
from xlaserve.serving.call import Call

BUSY_SECONDS = 1.0
"""Retry-After for callers with too many requests in flight."""
_EXAMINED = 16
"""Number of least recently used principals examined for eviction."""


class Admits(Protocol):
    """Enforces quotas of principals."""

    def admit(self, call: Call, principal: Principal, quota: Quota) -> None:
        """Count a call; raises QuotaExceeded, without counting it, if the quota is used up."""
        ...


class _Usage:
    """Usage of one principal: remaining tokens of its bucket, and requests in flight."""

    __slots__ = ("at", "in_flight", "left")

    def __init__(self, burst: float, at: float) -> None:
        self.left = burst
        self.at = at
        self.in_flight = 0

    def ended(self) -> None:
        """Count the end of a request."""
        self.in_flight -= 1


class Quotas:
    """Token buckets and in-flight counts of principals; evicts the least recently used.

    Principals with requests in flight are never evicted, since eviction would reset their in-flight
    counts. A principal is identified by name: a caller has one quota for all its credentials.
    """

    def __init__(self, max_principals: int, clock: Callable[[], float]) -> None:
        self._max_principals = max_principals
        self._clock = clock
        self._usage: OrderedDict[str, _Usage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._usage)

    def admit(self, call: Call, principal: Principal, quota: Quota) -> None:
        """Count a call; raises QuotaExceeded, without counting it, if the quota is used up."""
        now = self._clock()
        usage = self._usage.get(principal.name)
        if usage is None:
            usage = self._remember(principal, quota, now)
        else:
            self._usage.move_to_end(principal.name)
        most, rate = quota.concurrent_requests, quota.requests_per_second
        if most is not None and usage.in_flight >= most:
            text = f"{usage.in_flight} requests in flight, its limit is {most}"
            raise QuotaExceeded(principal.name, text, BUSY_SECONDS)
        if rate is not None:
            usage.left = min(quota.burst, usage.left + (now - usage.at) * rate)
            usage.at = now
            if usage.left < 1:
                text = f"exceeded {rate:g} requests per second"
                raise QuotaExceeded(principal.name, text, (1 - usage.left) / rate)
            usage.left -= 1
        if most is not None:
            usage.in_flight += 1
            call.hold(usage.ended)

    def _remember(self, principal: Principal, quota: Quota, now: float) -> _Usage:
        if len(self._usage) >= self._max_principals and not self._evict():
            text = f"to wait, since {len(self._usage)} callers are active (max_principals)"
            raise QuotaExceeded(principal.name, text, BUSY_SECONDS)
        usage = self._usage[principal.name] = _Usage(quota.burst, now)
        return usage

    def _evict(self) -> bool:
        for _ in range(min(_EXAMINED, len(self._usage))):
            name, usage = self._usage.popitem(last=False)
            if not usage.in_flight:
                return True
            self._usage[name] = usage
        return False
