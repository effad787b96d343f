"""The shared memory extension over HTTP: status, register, unregister."""

from typing import Annotated, Any

import msgspec

from xlaserve.core.serving.call import Api, Operation
from xlaserve.core.serving.shared_memory import Region, Regions
from xlaserve.errors import Unsupported
from xlaserve.transport.rest.messages import (
    HttpRequest,
    HttpResponse,
    Nothing,
    json_response,
    read_json,
)
from xlaserve.transport.rest.routing import Body, Route

_TAG = "shared memory"
_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"
CUDA = "CUDA shared memory"
"""What is not built: its handles are never opened."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class RegisterRequest(msgspec.Struct):
    """A region to be registered."""

    key: str
    """The name of the shared memory, as `shm_open` takes it."""
    byte_size: _Count
    offset: _Count = 0


class RegionRow(msgspec.Struct):
    """A region that is registered."""

    name: str
    key: str
    offset: int
    byte_size: int


class SharedMemoryRoutes:
    """The handlers of the shared memory extension."""

    def __init__(self, regions: Regions, *, max_json_depth: int) -> None:
        self._regions = regions
        self._max_json_depth = max_json_depth

    def table(self) -> list[Route]:
        """Return the rows of these handlers."""
        example = {"key": "/input", "offset": 0, "byte_size": 64}
        rows = [
            Route(
                "POST",
                f"{_SYSTEM}/region/{{region}}/register",
                Operation.MANAGE,
                self.register,
                "Register system shared memory",
                _TAG,
                Body(Nothing),
                takes=Body(RegisterRequest, example=example),
                errors=(400, 403, 408, 409, 413, 501, 503),
                api=Api.SHARED_MEMORY,
            ),
            Route(
                "POST",
                f"{_CUDA}/region/{{region}}/register",
                Operation.MANAGE,
                self.register_cuda,
                "Not implemented: CUDA shared memory",
                _TAG,
                errors=(501,),
                api=Api.SHARED_MEMORY,
            ),
        ]
        for root, kind, status, unregister in (
            (_SYSTEM, "system", self.status, self.unregister),
            (_CUDA, "CUDA", self.status_cuda, self.unregister_cuda),
        ):
            for path, errors in ((root, ()), (f"{root}/region/{{region}}", (404,))):
                rows.append(
                    Route(
                        "GET",
                        f"{path}/status",
                        Operation.METADATA,
                        status,
                        f"Status of {kind} shared memory",
                        _TAG,
                        Body(list[RegionRow]),
                        errors=errors,
                        api=Api.SHARED_MEMORY,
                    )
                )
                rows.append(
                    Route(
                        "POST",
                        f"{path}/unregister",
                        Operation.MANAGE,
                        unregister,
                        f"Unregister {kind} shared memory",
                        _TAG,
                        Body(Nothing),
                        errors=(403,),
                        api=Api.SHARED_MEMORY,
                    )
                )
        return rows

    async def register(self, request: HttpRequest) -> HttpResponse:
        """Register a region under the name in the path."""
        body = await request.read()
        asked: Any = read_json(body, RegisterRequest, max_depth=self._max_json_depth)
        name = request.names["region"]
        self._regions.register(request.call.peer, name, asked.key, asked.offset, asked.byte_size)
        return json_response(Nothing())

    async def status(self, request: HttpRequest) -> HttpResponse:
        """List the regions, or the one that the path names."""
        return json_response(
            [_row(r) for r in self._regions.status(request.names.get("region", ""))]
        )

    async def unregister(self, request: HttpRequest) -> HttpResponse:
        """Have a region, or all, registered no more."""
        self._regions.unregister(request.call.peer, request.names.get("region", ""))
        return json_response(Nothing())

    async def register_cuda(self, request: HttpRequest) -> HttpResponse:
        """Say that this server opens no handles of CUDA."""
        raise Unsupported(CUDA)

    async def status_cuda(self, request: HttpRequest) -> HttpResponse:
        """List nothing, as nothing is registered; for a name say that it is not there."""
        self._regions.status_cuda(request.names.get("region", ""))
        return json_response([])

    async def unregister_cuda(self, request: HttpRequest) -> HttpResponse:
        """Have nothing registered afterwards: as nothing can be, that is so already."""
        return json_response(Nothing())


def _row(region: Region) -> RegionRow:
    return RegionRow(region.name, region.key, region.offset, region.byte_size)
