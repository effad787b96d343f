"""Replaces the model id in a request message by the one from ModelMesh's headers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import structlog
from grpclib import GRPCError
from grpclib.encoding.base import CodecBase
from grpclib.server import Stream
from multidict import MultiMapping

from xlaserve.errors import InvalidRequest, VersionNotFound
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.identifiers import model_id, vmodel_id
from xlaserve.grpc.protobuf.codec import refusal_of
from xlaserve.grpc.protobuf.splice import InjectionPath, splice_string
from xlaserve.grpc.protobuf.wire import Data

T = TypeVar("T")

Metadata: TypeAlias = MultiMapping[str | bytes]

Splice: TypeAlias = Callable[[str, Data], Data]
"""Takes an id and a message; returns the message with that id. Raises MalformedMessage and
TooManyFields."""

OF_A_MESH = "mm-"
"""Prefix of the header names that ModelMesh uses."""


def splices(
    paths: Mapping[str, InjectionPath], *, max_fields: int, max_depth: int
) -> Mapping[str, Splice]:
    """Return a map from methods to splice functions, for all methods with an id path."""

    def splice(path: InjectionPath, value: str, data: Data) -> Data:
        return splice_string(data, path, value, max_fields=max_fields, max_depth=max_depth)

    return MappingProxyType({method: partial(splice, path) for method, path in paths.items()})


def decode_with(value: str, splice: Splice, decode: Callable[[Data], T], data: Data) -> T:
    """Decode a request after replacing its id by `value`.

    If the id cannot be replaced, decode the original, whose errors are more specific. If that
    succeeds, raise MalformedMessage or TooManyFields anyway: the request would keep the client's
    id.
    """
    try:
        spliced = splice(value, data)
    except (MalformedMessage, TooManyFields):
        decode(data)
        raise
    return decode(spliced)


def mesh_error(error: BaseException) -> BaseException:
    """Translate an error for ModelMesh: it would drop a loaded model after NOT_FOUND."""
    if not isinstance(error, VersionNotFound):
        return error
    translated = InvalidRequest(f"no such version: {error}")
    translated.__cause__ = error
    return translated


class _SplicingCodec(CodecBase):
    """Replaces the id in the serialized request, then decodes it with the wrapped codec."""

    def __init__(self, inner: CodecBase, value: str, splice: Splice) -> None:
        self._inner = inner
        self._value = value
        self._splice = splice

    @property
    def __content_subtype__(self) -> str:
        """Return the content subtype, after `application/grpc+`."""
        return "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return self._inner.encode(message, message_type)

    def decode(self, data: bytes, message_type: Any) -> Any:
        def decode(data: Any) -> Any:
            return self._inner.decode(data, message_type)

        try:
            return decode_with(self._value, self._splice, decode, data)
        except (MalformedMessage, TooManyFields) as error:
            refusal = refusal_of(error, message_type.__name__)
        raise GRPCError(refusal.status, refusal.message)


class Injection:
    """Replaces model ids in requests by the id from ModelMesh's headers.

    Maps full method names, `/package.Service/Method`, to splice functions. Because the serialized
    bytes are changed, services need not know about ModelMesh (ModelMesh SPI, idInjectionPath).
    """

    def __init__(self, by_method: Mapping[str, Splice]) -> None:
        self._by_method = by_method

    @contextmanager
    def into(self, stream: Stream[Any, Any], method: str, metadata: Metadata) -> Iterator[None]:
        """Within this context, replace the id in a stream's messages if the headers have one.

        Raises InvalidRequest if the headers are invalid or name two models.
        """
        splice = self._by_method.get(method)
        came_through = splice and any(name.startswith(OF_A_MESH) for name in metadata)
        value = model_id(metadata) if came_through else None
        if splice is None or value is None:
            yield
            return
        stream._codec = _SplicingCodec(stream._codec, value, splice)
        with structlog.contextvars.bound_contextvars(model_id=value, vmodel_id=vmodel_id(metadata)):
            try:
                yield
            except VersionNotFound as error:
                raise mesh_error(error) from error
