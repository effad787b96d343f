"""The contents of the status page: server, memory, and every known model."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import islice
from typing import NamedTuple

from xlaserve.concurrency.in_turns import in_turns
from xlaserve.concurrency.sharing import SingleFlight
from xlaserve.residence.capacity import Capacity
from xlaserve.residence.control import ModelControl
from xlaserve.residence.lifecycle import State
from xlaserve.residence.registry import Registry
from xlaserve.residence.reports.monitor import StatusRow, rows_of_model
from xlaserve.serving.access.sight import Sees, without_names
from xlaserve.serving.call import current_call
from xlaserve.serving.statistics import REQUEST_BOUNDS_NS
from xlaserve.settings.choices import ModelControlMode

MAX_ROWS = 6000
"""Maximum number of rows per reading, since a repository may hold any number of models."""

REPOSITORY_SECONDS = 5.0
"""How long a listing of the repository is reused, in seconds; readings come every second."""


TICK_SECONDS = 0.5
"""How long a reading is reused, in seconds, unless a model changes its state."""


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """Successful and failed requests of all versions."""

    success_count: int
    fail_count: int
    request_buckets: tuple[int, ...]
    """Number of successful requests by duration, in the intervals of REQUEST_BOUNDS_NS."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The server at one moment."""

    uptime_seconds: float
    ready: bool
    controllable: bool
    """Whether clients may load and unload."""
    used_bytes: int
    """Memory held by models or reserved for them."""
    total_bytes: int | None
    """Memory available to models; None while it is unknown."""
    totals: RequestTotals
    ready_models: int
    model_count: int
    """Number of known models, regardless of the search."""
    matching: int
    """Number of matching rows; `rows` may have fewer."""
    rows: Sequence[StatusRow]
    """One row per model version. A long list is cut: models that were never loaded are dropped
    first."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Processes that did not answer -> the reason."""


class _SharedReading(NamedTuple):
    """A reading, and the unfiltered rows for searches."""

    reading: Reading
    known: Sequence[StatusRow]
    others: Sequence[StatusRow]
    """Repository models for which no load was attempted."""
    until: float
    revision: int


class StatusBoard:
    """Takes readings between requests; concurrent readers share one reading."""

    def __init__(
        self,
        control: ModelControl,
        registry: Registry,
        capacity: Capacity,
        mode: ModelControlMode,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._registry = registry
        self._capacity = capacity
        self._mode = mode
        self._clock = clock
        self._started = clock()
        self._listed: Sequence[StatusRow] = ()
        """Repository models as rows, as last listed."""
        self._names: set[str] = set()
        self._listed_until = self._started
        self._reading: _SharedReading | None = None
        self._taking: SingleFlight[_SharedReading] = SingleFlight(abandonable=False)

    async def read(self, search: str = "") -> Reading:
        """Return a reading at most TICK_SECONDS old, taken after the last state change of a model.

        `search` selects the models whose names contain it.
        """
        shared = await self._now()
        if not search:
            return shared.reading
        needle = search.casefold()
        known = [row async for row in in_turns(shared.known) if needle in row.name.casefold()]
        others = [row async for row in in_turns(shared.others) if needle in row.name.casefold()]
        rows = [row async for row in in_turns(_first(known, others))]
        return replace(shared.reading, matching=len(known) + len(others), rows=rows)

    async def whole(self) -> Reading:
        """Return a reading with the rows of all models, unsorted, for further filtering."""
        shared = await self._now()
        return replace(shared.reading, rows=[*shared.known, *shared.others])

    async def _now(self) -> _SharedReading:
        shared = self._reading
        if shared is None or self._is_old(shared):
            shared = await self._taking.run("", self._take)
        return shared

    def _is_old(self, shared: _SharedReading) -> bool:
        return shared.revision != self._registry.revision or self._clock() >= shared.until

    async def _take(self) -> _SharedReading:
        # All callers share this reading, so it must not depend on one caller's permissions.
        current_call.set(None)
        # Read before the rows: a change in between invalidates this reading.
        revision = self._registry.revision
        failed = self._registry.failed.reasons
        others = [
            replace(row, reason=failed.get(row.name, row.reason)) if failed else row
            async for row in in_turns(await self._repository())
            if self._registry.find(row.name) is None
        ]
        known: list[StatusRow] = []
        totals = _Totals()
        ready = models = 0
        async for model in in_turns(self._registry.models()):
            rows = rows_of_model(self._registry, model)
            known += rows
            models += bool(rows)
            ready += any(row.state == State.READY.public for row in rows)
            totals.add(rows)
        reading = Reading(
            uptime_seconds=self._clock() - self._started,
            ready=self._control.follower.server_ready,
            controllable=self._mode is ModelControlMode.EXPLICIT,
            used_bytes=self._capacity.used_bytes,
            total_bytes=self._capacity.total_bytes,
            totals=totals.sum(),
            ready_models=ready,
            model_count=models + len(others),
            matching=len(known) + len(others),
            rows=[row async for row in in_turns(_first(known, others))],
        )
        until = self._clock() + TICK_SECONDS
        self._reading = _SharedReading(reading, known, others, until, revision)
        return self._reading

    async def _repository(self) -> Sequence[StatusRow]:
        """Return the repository's models, from a listing at most REPOSITORY_SECONDS old."""
        failed, catalog = self._registry.failed.reasons, self._control.catalog
        if self._clock() >= self._listed_until or not failed.keys() <= self._names:
            self._names = {*await catalog.names(), *failed}
            self._listed = [
                _not_loaded(name, catalog.why_not_loaded(name))
                async for name in in_turns(sorted(self._names))
            ]
            self._listed_until = self._clock() + REPOSITORY_SECONDS
        return self._listed


def status_in_sight(reading: Reading, sees: Sees, search: str = "") -> Reading:
    """Reduce a reading to the models that a caller may see, with sums over these only.

    `search` selects rows, but the sums include all models that the caller may see.
    """
    rows = [
        replace(row, reason=without_names(row.reason, sees))
        for row in reading.rows
        if sees(row.name)
    ]
    totals = _Totals()
    totals.add(rows)
    needle = search.casefold()
    found = [row for row in rows if needle in row.name.casefold()]
    loaded = sorted((row for row in found if row.version), key=_name)
    others = sorted((row for row in found if not row.version), key=_name)
    return replace(
        reading,
        used_bytes=sum(row.size_bytes or 0 for row in rows),
        total_bytes=None,
        totals=totals.sum(),
        ready_models=len({row.name for row in rows if row.state == State.READY.public}),
        model_count=len({row.name for row in rows}),
        matching=len(found),
        rows=list(_first(loaded, others)),
        missing={},
    )


def _name(row: StatusRow) -> str:
    return row.name


def _first(known: Sequence[StatusRow], others: Sequence[StatusRow]) -> Iterator[StatusRow]:
    """Merge the rows by name; if there are more than MAX_ROWS, drop `others` first."""
    room = max(0, MAX_ROWS - len(known))
    return merge(islice(known, MAX_ROWS), islice(others, room), key=_name)


def _not_loaded(name: str, reason: str) -> StatusRow:
    return StatusRow(
        name,
        version="",
        state=State.UNAVAILABLE.public,
        reason=reason,
        size_bytes=None,
        compile_seconds=None,
        pending=0,
        success_count=0,
        fail_count=0,
        request_ns=0,
        request_buckets=(),
        last_inference_ms=0,
    )


class _Totals:
    """Running sums of rows."""

    def __init__(self) -> None:
        self._success = self._fail = 0
        self._buckets = [0] * (len(REQUEST_BOUNDS_NS) + 1)

    def add(self, rows: Sequence[StatusRow]) -> None:
        """Add the counts of these rows to the sums."""
        for row in rows:
            self._success += row.success_count
            self._fail += row.fail_count
            if row.success_count:
                self._buckets = list(map(int.__add__, self._buckets, row.request_buckets))

    def sum(self) -> RequestTotals:
        """Return the sums of all rows added so far."""
        return RequestTotals(self._success, self._fail, tuple(self._buckets))
