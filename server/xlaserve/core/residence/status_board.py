"""The content of a status page: the server, its memory, and every model, loaded or not."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from xlaserve.core.residence.capacity import Capacity
from xlaserve.core.residence.control import ModelControl
from xlaserve.core.residence.lifecycle import State
from xlaserve.core.residence.monitor import StatusRow, status_rows
from xlaserve.core.residence.registry import Registry
from xlaserve.core.serving.statistics import REQUEST_BOUNDS_NS
from xlaserve.settings_choices import ModelControlMode

MAX_ROWS = 2000
"""Rows of one reading: a repository may hold more models than anybody can look at."""

REPOSITORY_SECONDS = 5.0
"""Seconds for which a listing of the repository is kept: readings come every second."""


@dataclass(frozen=True, slots=True)
class RequestTotals:
    """The requests of all versions together, by how they ended."""

    success_count: int
    fail_count: int
    request_buckets: tuple[int, ...]
    """Successful requests between the bounds of REQUEST_BOUNDS_NS, and above the last."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The server at one moment."""

    uptime_seconds: float
    ready: bool
    controllable: bool
    """Whether clients may load and unload."""
    used_bytes: int
    """Memory that models hold, or that is set aside for them."""
    total_bytes: int | None
    """Memory for models; None while it is not known."""
    totals: RequestTotals
    ready_models: int
    model_count: int
    """Models that are known, whatever was searched for."""
    matching: int
    """Rows that match; `rows` may be fewer."""
    rows: Sequence[StatusRow]
    """One entry for each name and version; models never loaded are left out of a long list."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a process of the server has no part in it, by its name."""


class StatusBoard:
    """Takes readings; cheap enough for one every second."""

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
        self._names: Sequence[str] = ()
        self._names_until = self._started

    async def read(self, search: str = "") -> Reading:
        """Return the server as it is, with the models whose names hold the text."""
        others = [name for name in await self._repository() if self._registry.find(name) is None]
        known = status_rows(self._registry)
        needle = search.casefold()
        matching = [row for row in known if needle in row.name.casefold()]
        matching += [_not_loaded(name) for name in others if needle in name.casefold()]
        ready = {row.name for row in known if row.state == State.READY.public}
        return Reading(
            uptime_seconds=self._clock() - self._started,
            ready=self._control.follower.server_ready,
            controllable=self._mode is ModelControlMode.EXPLICIT,
            used_bytes=self._capacity.used_bytes,
            total_bytes=self._capacity.total_bytes,
            totals=_totals(known),
            ready_models=len(ready),
            model_count=len({row.name for row in known}) + len(others),
            matching=len(matching),
            rows=sorted(matching[:MAX_ROWS], key=lambda row: row.name),
        )

    async def _repository(self) -> Sequence[str]:
        """Return the models that were never loaded, as the disk had them a moment ago."""
        if self._clock() >= self._names_until:
            index = await self._control.catalog.index()
            self._names = [entry.name for entry in index if not entry.version]
            self._names_until = self._clock() + REPOSITORY_SECONDS
        return self._names


def _not_loaded(name: str) -> StatusRow:
    return StatusRow(
        name,
        version="",
        state=State.UNAVAILABLE.public,
        reason="not loaded",
        size_bytes=None,
        compile_seconds=None,
        pending=0,
        success_count=0,
        fail_count=0,
        request_ns=0,
        request_buckets=(),
        last_inference_ms=0,
    )


def _totals(rows: Sequence[StatusRow]) -> RequestTotals:
    nothing = (0,) * (len(REQUEST_BOUNDS_NS) + 1)
    used = [row.request_buckets for row in rows if row.success_count]
    return RequestTotals(
        success_count=sum(row.success_count for row in rows),
        fail_count=sum(row.fail_count for row in rows),
        request_buckets=tuple(map(sum, zip(nothing, *used, strict=True))),
    )
