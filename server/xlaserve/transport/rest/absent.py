"""The routes that the protocol defines and this server does not have: 501, and not 404."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from xlaserve.core.serving.call import Operation
from xlaserve.errors import Unsupported
from xlaserve.transport.rest.messages import HttpRequest, HttpResponse
from xlaserve.transport.rest.routing import Route

_TAG = "absent"


@dataclass(frozen=True, slots=True)
class _Absent:
    """A feature that is not built, and its routes."""

    what: str
    methods: Sequence[str]
    paths: Sequence[str]

    def operation(self, method: str) -> Operation:
        """Return what a permission for it would be given for."""
        return Operation.METADATA if method == "GET" else Operation.MANAGE


_ROWS: Sequence[_Absent] = (
    _Absent(
        "the trace extension",
        ["GET", "POST"],
        ["/v2/trace/setting", "/v2/models/{model}/trace/setting"],
    ),
    _Absent("the logging extension", ["GET", "POST"], ["/v2/logging"]),
)


def absent_routes() -> list[Route]:
    """Return the rows of what is absent."""
    return [
        Route(
            method,
            path,
            row.operation(method),
            _refuse(row.what),
            f"Not implemented: {row.what}",
            _TAG,
            errors=(501,),
        )
        for row in _ROWS
        for path in row.paths
        for method in row.methods
    ]


def _refuse(what: str) -> Callable[[HttpRequest], Awaitable[HttpResponse]]:
    async def refuse(request: HttpRequest) -> HttpResponse:
        """Say that this server does not have it."""
        raise Unsupported(what)

    return refuse
