"""HTML pages: status, API documentation, and their parts."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib import resources
from types import MappingProxyType

import msgspec

from xlaserve.concurrency.others import NOBODY, Others
from xlaserve.http.dashboard import docs_page, openapi, protos
from xlaserve.http.dashboard.permits import Permits, permit_everything
from xlaserve.http.dashboard.status_page import SECURITY, Status, StatusRoutes
from xlaserve.http.messages import JSON_TYPE, HttpRequest, HttpResponse
from xlaserve.http.routing import Body, QueryParameter, Route
from xlaserve.residence.reports.status_board import StatusBoard
from xlaserve.residence.server import ServerDescription
from xlaserve.serving.call import Operation

_TAG = "people"
_HTML = "text/html; charset=utf-8"
_ZIP = "application/zip"
_GRPC_PORT = "8001"
"""Default gRPC port, if the setting lets the system choose one."""

_REVALIDATED = MappingProxyType({**SECURITY, "Cache-Control": "no-cache"})

_PARTS: tuple[tuple[str, str, str], ...] = (
    ("base.css", "text/css; charset=utf-8", "Style of both pages"),
    ("status.css", "text/css; charset=utf-8", "Style of the status page"),
    ("docs.css", "text/css; charset=utf-8", "Style of this documentation"),
    ("status.js", "text/javascript; charset=utf-8", "Script of the status page"),
    ("history.js", "text/javascript; charset=utf-8", "Rates and latencies of the status page"),
    ("charts.js", "text/javascript; charset=utf-8", "Charts of the status page"),
    ("histories.js", "text/javascript; charset=utf-8", "Histories of all models"),
    ("overview.js", "text/javascript; charset=utf-8", "Hour of the status page"),
    ("table.js", "text/javascript; charset=utf-8", "List of models"),
    ("sign_in.js", "text/javascript; charset=utf-8", "Signing in"),
    ("token.js", "text/javascript; charset=utf-8", "Token of this tab"),
    ("words.js", "text/javascript; charset=utf-8", "Words for numbers, and parts of pages"),
    ("events.js", "text/javascript; charset=utf-8", "Events of the server"),
    ("hosting.js", "text/javascript; charset=utf-8", "Models of ModelMesh or SageMaker"),
    ("control.js", "text/javascript; charset=utf-8", "Loads and unloads of the status page"),
    ("model.js", "text/javascript; charset=utf-8", "Page of a model"),
    ("try.js", "text/javascript; charset=utf-8", "Form that tries a model"),
    ("chat.js", "text/javascript; charset=utf-8", "Chat with a generator"),
    ("streams.js", "text/javascript; charset=utf-8", "Streams of events"),
    ("npy.js", "text/javascript; charset=utf-8", "Reader of files of numpy"),
    ("calls.js", "text/javascript; charset=utf-8", "Calls to copy"),
    ("answers.js", "text/javascript; charset=utf-8", "Answers of a model"),
    ("model.css", "text/css; charset=utf-8", "Style of the page of a model"),
    ("docs.js", "text/javascript; charset=utf-8", "Script of this documentation"),
    ("icon.svg", "image/svg+xml", "Icon of both pages"),
)
"""Files of the pages: name, media type, and description."""


@dataclass(frozen=True, slots=True)
class Document:
    """A page, or a part of one, that never changes."""

    content_type: str
    data: bytes

    async def serve(self, request: HttpRequest) -> HttpResponse:
        """Return the document as it was when the server started."""
        return HttpResponse(content_type=self.content_type, parts=[self.data], headers=_REVALIDATED)


@dataclass(frozen=True, slots=True)
class Description:
    """The OpenAPI description, with the path prefix under which a trusted proxy serves it."""

    written: openapi.Object
    document: Document

    async def serve(self, request: HttpRequest) -> HttpResponse:
        """Return the description of the server's start, with that prefix."""
        prefix = request.call.peer.prefix
        if not prefix:
            return await self.document.serve(request)
        description = self.written | {"servers": [{"url": prefix}]}
        return await Document(JSON_TYPE, msgspec.json.encode(description)).serve(request)


def page_routes(
    routes: Iterable[Route],
    board: StatusBoard,
    description: ServerDescription,
    others: Others = NOBODY,
    permits: Permits = permit_everything,
    *,
    grpc_endpoint: str = "",
    platform: str = "",
) -> list[Route]:
    """Return the routes of the pages; the description covers the other `routes` and these.

    `permits` determines the actions that a page offers to a client. gRPC examples use the setting
    `grpc_endpoint`. `platform` names the system that controls loading.
    """
    status = StatusRoutes(board, description, others, permits, platform)
    rows = [
        _shell("/", "Status page", _HTML, _file("status.html")),
        Route(
            "GET",
            "/status.json",
            Operation.PAGE,
            status.status,
            "Data of the status page",
            _TAG,
            Body(Status),
            query=(QueryParameter("search", str, "Only models whose names contain this text."),),
        ),
        *(
            _shell(f"/page/{name}", summary, content_type, _file(name))
            for name, content_type, summary in _PARTS
        ),
    ]
    address = _address(grpc_endpoint)
    return [*rows, *_descriptions([*routes, *rows], description.version, address)]


def _address(endpoint: str) -> str:
    """Return the address at which a client on this machine reaches an endpoint."""
    kind, _, rest = endpoint.partition(":")
    if kind == "unix":
        return f"-unix {rest}"
    port = rest.rpartition(":")[2]
    return f"localhost:{port if port.isdecimal() and port != '0' else _GRPC_PORT}"


def _descriptions(described: Iterable[Route], version: str, address: str) -> list[Route]:
    files = protos.read_protos()
    archive = protos.archive(files, address)
    rows = [
        _document("/v2/docs", "This documentation", _HTML, b""),
        _document("/v2/docs/openapi.json", "OpenAPI 3.1 description", JSON_TYPE, b""),
        _document("/v2/docs/protos.zip", "Protos of gRPC, and calls of grpcurl", _ZIP, archive),
    ]
    written = openapi.describe([*described, *rows], version=version)
    described_as = Document(JSON_TYPE, msgspec.json.encode(written))
    page = docs_page.render(written, protos.services(files), address)
    return [
        _document("/v2/docs", rows[0].summary, _HTML, page.encode()),
        replace(rows[1], handle=Description(written, described_as).serve),
        rows[2],
    ]


def _document(path: str, summary: str, content_type: str, data: bytes) -> Route:
    media_type = content_type.partition(";")[0]
    document = Document(content_type, data)
    answer = Body(media_types=(media_type,))
    return Route("GET", path, Operation.PAGE, document.serve, summary, _TAG, answer)


def _shell(path: str, summary: str, content_type: str, data: bytes) -> Route:
    """Return the route of a public file, so that the page can ask for a token."""
    return replace(_document(path, summary, content_type, data), operation=Operation.SHELL)


def _file(name: str) -> bytes:
    return resources.files("xlaserve.http.dashboard").joinpath("page", name).read_bytes()
