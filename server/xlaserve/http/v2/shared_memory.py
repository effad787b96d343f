"""The shared memory extension over HTTP: status, register, unregister."""

from base64 import b64decode
from typing import Annotated, Any

import msgspec

from xlaserve.errors import InvalidRegion, Unsupported
from xlaserve.http.messages import HttpRequest, HttpResponse, Nothing, json_response
from xlaserve.http.parsing import read_whole
from xlaserve.http.routing import Body, Route
from xlaserve.http.threads import OffLoop
from xlaserve.serving.access.sight import require_all_seen
from xlaserve.serving.call import Api, Operation
from xlaserve.serving.inputs.cuda_regions import CudaRegions
from xlaserve.serving.inputs.shared_memory import Region, Regions, shown

_TAG = "shared memory"
_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class RegisterRequest(msgspec.Struct):
    """A region to register."""

    key: str
    """The name of the shared memory object, as for `shm_open`."""
    byte_size: _Count
    offset: _Count = 0


class RawHandle(msgspec.Struct):
    """A handle of CUDA memory."""

    b64: str
    """A base64-encoded cudaIpcMemHandle_t."""


class CudaRegisterRequest(msgspec.Struct):
    """CUDA memory to register."""

    raw_handle: RawHandle
    byte_size: _Count
    device_id: _Count = 0


class CudaRegionRow(msgspec.Struct):
    """Registered CUDA memory."""

    name: str
    device_id: int
    byte_size: int


class RegionRow(msgspec.Struct):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int


class SharedMemoryRoutes:
    """The handlers of the shared memory extension."""

    def __init__(self, regions: Regions, threads: OffLoop, *, max_json_depth: int) -> None:
        self._regions = regions
        self._threads = threads
        self._cuda = CudaRegions(regions)
        self._max_json_depth = max_json_depth

    def table(self) -> list[Route]:
        """Return the routes of these handlers."""
        cuda = {"raw_handle": {"b64": "A" * 88}, "device_id": 0, "byte_size": 64}
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
                "Register CUDA shared memory; not implemented unless JAX runs on CUDA",
                _TAG,
                Body(Nothing),
                takes=Body(CudaRegisterRequest, example=cuda),
                errors=(400, 403, 408, 409, 413, 501, 503),
                api=Api.SHARED_MEMORY,
            ),
        ]
        for root, kind, status, unregister, row in (
            (_SYSTEM, "system", self.status, self.unregister, RegionRow),
            (_CUDA, "CUDA", self.status_cuda, self.unregister_cuda, CudaRegionRow),
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
                        Body(list[row]),  # type: ignore[valid-type]
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
        body: RegisterRequest = await self._read(request, RegisterRequest)
        name = request.names["region"]
        await self._regions.register_everywhere(
            request.call.peer, name, body.key, body.offset, body.byte_size
        )
        return json_response(Nothing())

    async def status(self, request: HttpRequest) -> HttpResponse:
        """List all regions, or only the one named in the path."""
        return json_response(
            [_row(r) for r in self._regions.status(request.names.get("region", ""))]
        )

    async def unregister(self, request: HttpRequest) -> HttpResponse:
        """Unregister the region named in the path, or all regions."""
        await self._regions.unregister_everywhere(
            request.call.peer, request.names.get("region", "")
        )
        return json_response(Nothing())

    async def register_cuda(self, request: HttpRequest) -> HttpResponse:
        """Open a CUDA memory handle, and register it under the name in the path."""
        require_all_seen()
        if self._regions.driver is None:
            raise Unsupported("CUDA shared memory")  # regardless of the body
        body: CudaRegisterRequest = await self._read(request, CudaRegisterRequest)
        name, handle = request.names["region"], body.raw_handle.b64
        try:
            raw = b64decode(handle, validate=True)
        except ValueError as error:
            raise InvalidRegion(shown(name), "a raw_handle in base64", f"{error}") from error
        self._cuda.register(request.call.peer, name, raw, body.device_id, body.byte_size)
        return json_response(Nothing())

    async def status_cuda(self, request: HttpRequest) -> HttpResponse:
        """List all CUDA memory regions, or only the one named in the path."""
        found = self._cuda.status(request.names.get("region", ""))
        return json_response([CudaRegionRow(r.name, r.device, r.byte_size) for r in found])

    async def unregister_cuda(self, request: HttpRequest) -> HttpResponse:
        """Unregister the CUDA memory region named in the path, or all of them."""
        self._cuda.unregister(request.call.peer, request.names.get("region", ""))
        return json_response(Nothing())

    async def _read(self, request: HttpRequest, kind: type) -> Any:
        return await read_whole(self._threads, request, kind, max_depth=self._max_json_depth)


def _row(region: Region) -> RegionRow:
    return RegionRow(region.name, region.key, region.offset, region.byte_size)
