"""Carries out what runtimeStatus advertises: the id of a header replaces the one in the message."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import structlog
from grpclib.encoding.base import CodecBase
from grpclib.events import RecvRequest, listen
from grpclib.server import Server, Stream

from xlaserve.errors import InvalidRequest, VersionNotFound
from xlaserve.transport.grpc.decoder import TooManyFields
from xlaserve.transport.grpc.identifiers import model_id, vmodel_id
from xlaserve.transport.grpc.splice import InjectionPath, splice_string
from xlaserve.transport.grpc.wire import MalformedMessage


class _SplicingCodec(CodecBase):
    """Rewrites the id in the serialized request, then decodes as before."""

    def __init__(self, inner: CodecBase, splice: Callable[[bytes], Any]) -> None:
        self._inner = inner
        self._splice = splice

    @property
    def __content_subtype__(self) -> str:
        """Return what stands behind `application/grpc+` in the content type."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return self._inner.encode(message, message_type)

    def decode(self, data: bytes, message_type: Any) -> Any:
        try:
            spliced = self._splice(data)
        except (MalformedMessage, TooManyFields):
            # The codec refuses it in its own words; should it not, the id would be the client's.
            self._inner.decode(data, message_type)
            raise
        return self._inner.decode(spliced, message_type)


def inject_ids(
    server: Server, paths: Mapping[str, InjectionPath], *, max_fields: int, max_depth: int
) -> None:
    """Make the header of a mesh beat the message, for every method that has a path.

    `paths` is by full method name, `/package.Service/Method`. Because the bytes are rewritten,
    a service behind it needs to know nothing of meshes (ModelMesh SPI, idInjectionPath).
    """

    def splice(path: InjectionPath, value: str, data: bytes) -> Any:
        return splice_string(data, path, value, max_fields=max_fields, max_depth=max_depth)

    async def on_request(event: RecvRequest) -> None:
        path = paths.get(event.method_name)
        if path is not None and any(name.startswith("mm-") for name in event.metadata):
            event.method_func = _Injected(event, partial(splice, path))

    listen(server, RecvRequest, on_request)


class _Injected:
    """The handler of one request that came through a mesh."""

    def __init__(self, event: RecvRequest, splice: Callable[[str, bytes], Any]) -> None:
        self._inner = event.method_func
        self._metadata = event.metadata
        self._splice = splice

    async def __call__(self, stream: Stream[Any, Any]) -> None:
        value = model_id(self._metadata)
        if value is None:
            await self._inner(stream)
            return
        stream._codec = _SplicingCodec(stream._codec, partial(self._splice, value))
        with structlog.contextvars.bound_contextvars(
            model_id=value, vmodel_id=vmodel_id(self._metadata)
        ):
            try:
                await self._inner(stream)
            except VersionNotFound as error:
                # NOT_FOUND would make the mesh drop a model that is there.
                raise InvalidRequest(f"no such version: {error}") from error
