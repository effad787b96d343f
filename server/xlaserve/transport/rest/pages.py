"""Pages for people: the status page, the description of the routes, and parts of both."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType
from typing import Annotated

import msgspec

from xlaserve.core.others import NOBODY, About, Others, Question
from xlaserve.core.residence.fold_status import fold_readings
from xlaserve.core.residence.monitor import StatusRow
from xlaserve.core.residence.status_board import Reading, StatusBoard
from xlaserve.core.server import ServerDescription
from xlaserve.core.serving.call import Operation
from xlaserve.core.serving.statistics import REQUEST_BOUNDS_NS
from xlaserve.transport.rest import docs_page, openapi
from xlaserve.transport.rest.messages import JSON_TYPE, HttpRequest, HttpResponse
from xlaserve.transport.rest.routing import Body, QueryParameter, Route

_TAG = "people"
_HTML = "text/html; charset=utf-8"

_SECURITY: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
)
"""Headers that keep a model's name from becoming part of a page."""

_FRESH = MappingProxyType({**_SECURITY, "Cache-Control": "no-store"})
_REVALIDATED = MappingProxyType({**_SECURITY, "Cache-Control": "no-cache"})

_PARTS: tuple[tuple[str, str, str], ...] = (
    ("base.css", "text/css; charset=utf-8", "Style of both pages"),
    ("status.css", "text/css; charset=utf-8", "Style of the status page"),
    ("docs.css", "text/css; charset=utf-8", "Style of this documentation"),
    ("status.js", "text/javascript; charset=utf-8", "Script of the status page"),
    ("history.js", "text/javascript; charset=utf-8", "Rates and latencies of the status page"),
    ("charts.js", "text/javascript; charset=utf-8", "Charts of the status page"),
    ("docs.js", "text/javascript; charset=utf-8", "Script of this documentation"),
    ("icon.svg", "image/svg+xml", "Icon of both pages"),
)
"""The files that pages load: name, media type, and what they are."""


class Server(msgspec.Struct):
    """The server."""

    name: str
    version: str
    uptime_seconds: float
    ready: bool
    controllable: Annotated[bool, msgspec.Meta(description="Whether clients may load and unload.")]


class Memory(msgspec.Struct):
    """Memory for models."""

    used_bytes: int
    total_bytes: Annotated[int | None, msgspec.Meta(description="null while it is not known.")]


class Requests(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of requests since the start, of which rates and latencies are the differences."""

    success: int = 0
    fail: int = 0
    buckets: Annotated[
        tuple[int, ...],
        msgspec.Meta(description="Successful ones between the bounds, and above the last."),
    ] = ()


_NO_REQUESTS = Requests()


class ModelRow(msgspec.Struct, omit_defaults=True):
    """One version of a model, or a model that was never loaded."""

    name: str
    state: str
    version: str = ""
    reason: str = ""
    size_bytes: int | None = None
    pending: int = 0
    requests: Requests = _NO_REQUESTS


class Status(msgspec.Struct):
    """The server at one moment."""

    server: Server
    memory: Memory
    requests: Requests
    bounds_ns: Annotated[
        tuple[int, ...], msgspec.Meta(description="Longest duration of each bucket but the last.")
    ]
    ready_models: int
    model_count: int
    matching: Annotated[
        int, msgspec.Meta(description="Rows that match the search; `models` may hold fewer.")
    ]
    models: list[ModelRow]
    missing: Annotated[
        Mapping[str, str],
        msgspec.Meta(description="Why a process of the server has no part in it, by its name."),
    ]


@dataclass(frozen=True, slots=True)
class Document:
    """A page or a part of one that never changes."""

    content_type: str
    data: bytes

    async def serve(self, request: HttpRequest) -> HttpResponse:
        """Return it as it was when the server started."""
        return HttpResponse(content_type=self.content_type, parts=[self.data], headers=_REVALIDATED)


class StatusRoutes:
    """The handlers of what changes."""

    def __init__(
        self, board: StatusBoard, description: ServerDescription, others: Others = NOBODY
    ) -> None:
        self._board = board
        self._description = description
        self._others = others
        others.answer(Question.STATUS, self._own)

    async def status(self, request: HttpRequest) -> HttpResponse:
        """Return what the status page shows; it asks every second."""
        about = {"search": request.query.get("search", "")}
        own = await self._own(about)
        asked = await self._others.ask(Question.STATUS, about, own, Reading)
        reading = fold_readings(asked.answers, asked.missing) if self._others.are_there else own
        await asyncio.sleep(0)  # with very many models requests have their turn in between
        data = msgspec.json.encode(self._status(reading))
        # Not compressed: that would take longer than making it.
        return HttpResponse(parts=[data], headers=_FRESH, compressible=False)

    async def _own(self, about: About) -> Reading:
        return await self._board.read(about["search"])

    def _status(self, reading: Reading) -> Status:
        description, totals = self._description, reading.totals
        return Status(
            Server(
                description.name,
                description.version,
                reading.uptime_seconds,
                reading.ready,
                reading.controllable,
            ),
            Memory(reading.used_bytes, reading.total_bytes),
            Requests(totals.success_count, totals.fail_count, totals.request_buckets),
            REQUEST_BOUNDS_NS,
            reading.ready_models,
            reading.model_count,
            reading.matching,
            [_model(row) for row in reading.rows],
            dict(reading.missing),
        )


def _model(row: StatusRow) -> ModelRow:
    counted = (row.success_count, row.fail_count, row.request_buckets)
    return ModelRow(
        row.name,
        row.state,
        version=row.version,
        reason=row.reason,
        size_bytes=row.size_bytes,
        pending=row.pending,
        # The same object as the default is left out: most of many models are idle.
        requests=Requests(*counted) if any(counted[:2]) else _NO_REQUESTS,
    )


def page_routes(
    routes: Iterable[Route],
    board: StatusBoard,
    description: ServerDescription,
    others: Others = NOBODY,
) -> list[Route]:
    """Return the rows of the pages; the description names the other `routes` and these."""
    status = StatusRoutes(board, description, others)
    rows = [
        _document("/", "Status page", _HTML, _file("status.html")),
        Route(
            "GET",
            "/status.json",
            Operation.PAGE,
            status.status,
            "What the status page shows",
            _TAG,
            Body(Status),
            query=(QueryParameter("search", str, "A text that names must hold."),),
        ),
        *(
            _document(f"/page/{name}", summary, content_type, _file(name))
            for name, content_type, summary in _PARTS
        ),
    ]
    return [*rows, *_descriptions([*routes, *rows], description.version)]


def _descriptions(described: Iterable[Route], version: str) -> list[Route]:
    rows = [
        _document("/v2/docs", "This documentation", _HTML, b""),
        _document("/v2/docs/openapi.json", "OpenAPI 3.1 description", JSON_TYPE, b""),
    ]
    written = openapi.describe([*described, *rows], version=version)
    return [
        _document("/v2/docs", rows[0].summary, _HTML, docs_page.render(written).encode()),
        _document(
            "/v2/docs/openapi.json", rows[1].summary, JSON_TYPE, msgspec.json.encode(written)
        ),
    ]


def _document(path: str, summary: str, content_type: str, data: bytes) -> Route:
    media_type = content_type.partition(";")[0]
    document = Document(content_type, data)
    answer = Body(media_types=(media_type,))
    return Route("GET", path, Operation.PAGE, document.serve, summary, _TAG, answer)


def _file(name: str) -> bytes:
    return resources.files("xlaserve.transport.rest").joinpath("page", name).read_bytes()
