"""Quotas of principals, enforced across all processes of a server."""

import time
from collections.abc import Callable
from functools import partial

from xlaserve.errors.access import QuotaExceeded
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.access.quota_table import Contended, Place, QuotaTable
from xlaserve.serving.access.quotas import BUSY_SECONDS
from xlaserve.serving.access.rules import Quota
from xlaserve.serving.call import Call

_SECOND_NS = 1e9
_LONGEST_NS = 1 << 62
"""Maximum duration of a burst (146 years), because times are 63-bit words."""
_MOST_PLACES = 1024
"""Maximum number of cached row locations, each of which takes a hash to compute."""


class SharedQuotas:
    """Enforces quotas over all processes; evicts the least recently used principals.

    Principals with requests in flight are not evicted. If a process is suspended while it holds the
    lock of a set (`QuotaTable`), the others refuse that set's callers instead of waiting.
    """

    def __init__(
        self, table: QuotaTable, process: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """The clock must be common to all processes."""
        self._table = table
        self._process = process
        self._now_ns = now_ns
        self._places: dict[str, Place] = {}

    def admit(self, call: Call, principal: Principal, quota: Quota) -> None:
        """Count a call; raises QuotaExceeded, without counting it, if the quota is used up."""
        table, name = self._table, principal.name
        place = self._places.get(name) or self._remember(name)
        try:
            table.lock(place.set)
        except Contended:
            text = "to wait, since another server process counts its requests"
            raise QuotaExceeded(name, text, BUSY_SECONDS) from None
        try:
            now = self._now_ns()
            if not table.find(place, now):
                text = "to wait, since too many callers are active (max_principals)"
                raise QuotaExceeded(name, text, BUSY_SECONDS)
            self._admit_to(place.row, call, name, quota, now)
        finally:
            table.unlock(place.set)

    def _remember(self, name: str) -> Place:
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        place = self._places[name] = self._table.place_of(name)
        return place

    def _admit_to(self, row: int, call: Call, name: str, quota: Quota, now: int) -> None:
        table = self._table
        most, rate = quota.concurrent_requests, quota.requests_per_second
        if most is not None and (in_flight := table.in_flight(row)) >= most:
            text = f"{in_flight} requests in flight, its limit is {most}"
            raise QuotaExceeded(name, text, BUSY_SECONDS)
        if rate is not None:
            each = min(_SECOND_NS / rate, _LONGEST_NS / (quota.burst + 1))
            used = max(table.used_until(row), now)
            late = used - now - (quota.burst - 1) * each
            if late > 0:
                text = f"exceeded {rate:g} requests per second"
                raise QuotaExceeded(name, text, late / _SECOND_NS)
            table.use(row, int(used + each))
        if most is not None:
            table.count(row, self._process, 1)
            call.hold(partial(table.count, row, self._process, -1))
