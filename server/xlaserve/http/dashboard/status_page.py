"""The server status as JSON, serialized in steps so that requests are served in between."""

import asyncio
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, NamedTuple

import msgspec

from xlaserve.concurrency.in_turns import AT_A_TIME, in_turns
from xlaserve.concurrency.others import NOBODY, About, Others, Question
from xlaserve.http.dashboard.permits import Permits, models_shown, permit_everything
from xlaserve.http.messages import HttpRequest, HttpResponse
from xlaserve.residence.reports.fold_status import fold_readings
from xlaserve.residence.reports.monitor import StatusRow
from xlaserve.residence.reports.status_board import Reading, StatusBoard, status_in_sight
from xlaserve.residence.server import ServerDescription
from xlaserve.serving.access.sight import Sees, everything, nothing
from xlaserve.serving.call import Operation
from xlaserve.serving.statistics import REQUEST_BOUNDS_NS

SECURITY: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
)
"""Headers that prevent scripts injected through model names from running in a page."""

_FRESH = MappingProxyType({**SECURITY, "Cache-Control": "no-store"})

_ALL: About = MappingProxyType({"search": ""})

_NO_ROWS = b"[]}"
"""The end of a status without rows, which are its last field."""


class Server(msgspec.Struct):
    """The server-wide part of the status."""

    name: str
    version: str
    uptime_seconds: float
    ready: bool
    controllable: Annotated[
        bool, msgspec.Meta(description="Whether the client may load and unload models.")
    ]
    platform: Annotated[
        str,
        msgspec.Meta(
            description="The platform that loads the models, ModelMesh or SageMaker; may be empty."
        ),
    ]


class Memory(msgspec.Struct):
    """Memory available to models, and its use."""

    used_bytes: int
    total_bytes: Annotated[int | None, msgspec.Meta(description="null while unknown.")]


class Requests(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request counts since the start, from which the page computes rates and latencies."""

    success: int = 0
    fail: int = 0
    buckets: Annotated[
        tuple[int, ...],
        msgspec.Meta(
            description="Successful requests per latency bucket; `bounds_ns` has the bounds."
        ),
    ] = ()


_NO_REQUESTS = Requests()


class ModelRow(msgspec.Struct, omit_defaults=True):
    """One version of a model, or a model without versions."""

    name: str
    state: str
    version: str = ""
    reason: str = ""
    size_bytes: int | None = None
    pending: int = 0
    requests: Requests = _NO_REQUESTS
    fixed: Annotated[
        bool, msgspec.Meta(description="Whether the client may not load or unload the model.")
    ] = False


class Status(msgspec.Struct):
    """The status of the server at one moment."""

    server: Server
    memory: Memory
    requests: Requests
    bounds_ns: Annotated[
        tuple[int, ...],
        msgspec.Meta(description="Upper bounds of the latency buckets; the last has none."),
    ]
    ready_models: int
    model_count: int
    matching: Annotated[
        int,
        msgspec.Meta(description="Number of rows matching the search; `models` may have fewer."),
    ]
    missing: Annotated[
        Mapping[str, str],
        msgspec.Meta(description="Server processes whose data is missing, each with the reason."),
    ]
    models: list[ModelRow]


class _Written(NamedTuple):
    """A serialized status, as sent to a client."""

    reading: Reading
    manages: Sees
    tag: str
    """Equal for equal statuses, apart from the uptime."""
    parts: Sequence[bytes]


class StatusRoutes:
    """Handlers of the data that the status page polls."""

    def __init__(
        self,
        board: StatusBoard,
        description: ServerDescription,
        others: Others = NOBODY,
        permits: Permits = permit_everything,
        platform: str = "",
    ) -> None:
        self._platform = platform
        self._permits = permits
        self._board = board
        self._description = description
        self._others = others
        self._written: _Written | None = None
        """The last status, reused because many pages may ask within a second."""
        others.answer(Question.STATUS, self._own)

    async def status(self, request: HttpRequest) -> HttpResponse:
        """Return the data of the status page, which polls every second.

        Answers 304 if the client's copy (`If-None-Match`) differs only in the uptime.
        """
        search = request.query.get("search", "")
        sees = models_shown(self._permits, request.call)
        manages = self._permits(request.call, Operation.MANAGE)
        if sees is everything:
            written = await self._shared(await self._read({"search": search}), manages)
        else:
            reading = await (self._read(_ALL) if self._others.are_there else self._board.whole())
            reading = await asyncio.to_thread(status_in_sight, reading, sees, search)
            written = await self._write(reading, manages)
        headers = {**_FRESH, "ETag": written.tag}
        if request.headers.get("If-None-Match") == written.tag:
            return HttpResponse(HTTPStatus.NOT_MODIFIED, headers=headers, compressible=False)
        # Not compressed: compression would take longer than making the response.
        return HttpResponse(parts=written.parts, headers=headers, compressible=False)

    async def _read(self, about: About) -> Reading:
        own = await self._own(about)
        if not self._others.are_there:
            return own
        replies = await self._others.ask(Question.STATUS, about, own, Reading)
        return await asyncio.to_thread(fold_readings, replies.answers, replies.missing)

    async def _shared(self, reading: Reading, manages: Sees) -> _Written:
        """Return a status of all models, reusing the last one if the reading is the same."""
        written = self._written
        if written is None or written.reading is not reading or written.manages is not manages:
            written = self._written = await self._write(reading, manages)
        return written

    async def _own(self, about: About) -> Reading:
        return await self._board.read(about["search"])

    async def _write(self, reading: Reading, manages: Sees) -> _Written:
        """Serialize a status, some rows at a time."""
        digest = blake2b(msgspec.json.encode(self._status(reading, manages, 0.0)), digest_size=12)
        head = msgspec.json.encode(self._status(reading, manages, reading.uptime_seconds))
        parts = [head.removesuffix(_NO_ROWS) + b"["]
        async for start in in_turns(range(0, len(reading.rows), AT_A_TIME), 1):
            rows = reading.rows[start : start + AT_A_TIME]
            models = [_model(row, is_fixed=not manages(row.name)) for row in rows]
            comma = b"" if len(parts) == 1 else b","
            parts.append(comma + msgspec.json.encode(models)[1:-1])
            digest.update(parts[-1])
        return _Written(reading, manages, f'"{digest.hexdigest()}"', [*parts, b"]}"])

    def _status(self, reading: Reading, manages: Sees, uptime_seconds: float) -> Status:
        description, totals = self._description, reading.totals
        return Status(
            Server(
                description.name,
                description.version,
                uptime_seconds,
                reading.ready,
                reading.controllable and manages is not nothing,
                self._platform,
            ),
            Memory(reading.used_bytes, reading.total_bytes),
            Requests(totals.success_count, totals.fail_count, totals.request_buckets),
            REQUEST_BOUNDS_NS,
            reading.ready_models,
            reading.model_count,
            reading.matching,
            dict(reading.missing),
            [],
        )


def _model(row: StatusRow, *, is_fixed: bool) -> ModelRow:
    counted = (row.success_count, row.fail_count, row.request_buckets)
    return ModelRow(
        row.name,
        row.state,
        version=row.version,
        reason=row.reason,
        size_bytes=row.size_bytes,
        pending=row.pending,
        # The default object is omitted from the JSON: most of many models are idle.
        requests=Requests(*counted) if any(counted[:2]) else _NO_REQUESTS,
        fixed=is_fixed,
    )
