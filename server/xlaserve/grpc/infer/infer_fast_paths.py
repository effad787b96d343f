"""Chooses the fast path of a ModelInfer request from its headers."""

from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any

from grpclib import GRPCError
from grpclib.metadata import decode_metadata
from structlog.contextvars import bind_contextvars

from xlaserve.errors import InvalidRequest
from xlaserve.errors.message import MalformedMessage, TooManyFields
from xlaserve.grpc.http2.headers import RequestKind
from xlaserve.grpc.http2.stream import Buffer, Route, ServerStream
from xlaserve.grpc.identifiers import ID_HEADERS, model_id, split_binary_lists, vmodel_id
from xlaserve.grpc.infer.infer_codec import DecodedInfer, InferCodec
from xlaserve.grpc.infer.infer_fast_path import InferFastPath, refusal_for
from xlaserve.grpc.infer.long_messages import LongMessages
from xlaserve.grpc.injection import OF_A_MESH, Splice, decode_with, mesh_error
from xlaserve.net.bounded_cache import BoundedCache
from xlaserve.serving.call import NOBODY, Peer
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.inference import InferRequest
from xlaserve.serving.repeats import Repeats

_MAX_FAST_PATHS = 256
"""Maximum number of fast paths cached per connection, one for each model named in headers."""
_MAX_KEY_CHARACTERS = 512


class InferFastPaths:
    """The fast paths of one connection; some requests go to the general path instead."""

    def __init__(
        self,
        engine: Engine,
        gates: Gates,
        codec: InferCodec,
        splice: Splice | None,
        general: Route,
        *,
        long: LongMessages,
        peer: Peer = NOBODY,
        repeats: Repeats | None = None,
        compress_answers: bool = True,
    ) -> None:
        """`splice` is None if no mesh is used; ModelMesh's headers are then ignored."""
        self._general = general
        self._compress_answers = compress_answers
        self._codec = codec
        self._splice = splice
        self._make = partial(InferFastPath, engine, gates, codec, general, long, peer=peer)
        self._plain = self._routes(repeats=repeats)
        self._compressing: tuple[Route, Route | None] | None = None
        """The routes for clients that use compression; created for the first such request."""

    def _routes(self, **options: Any) -> tuple[Route, Route | None]:
        """Return the fast path, and the one for requests with ModelMesh's headers, if any."""
        make = partial(self._make, **options)
        fast_path = make()
        if self._splice is None:
            return fast_path, None
        return fast_path, _MeshFastPath(make, self._codec, self._splice, fast_path, self._general)

    def __call__(self, kind: RequestKind[Route]) -> Route:
        """Return the route for requests with the header names of `kind`."""
        route, mesh = self._plain
        if "grpc-encoding" in kind.places:
            if self._compressing is None:
                self._compressing = self._routes(
                    compresses=True, compress_answers=self._compress_answers
                )
            route, mesh = self._compressing
        if mesh is not None and any(name.startswith(OF_A_MESH) for name in kind.places):
            if any(len(kind.places.get(name, ())) > 1 for name in ID_HEADERS):
                return self._general  # the general path rejects repeated id headers
            route = mesh
        return route


class _MeshFastPath:
    """The route for requests whose headers name a model; delegates to one fast path per model.

    The fast paths are cached by the values of the headers, which must not be repeated.
    """

    message_first = True

    def __init__(
        self,
        make: Callable[..., InferFastPath],
        codec: InferCodec,
        splice: Splice,
        fast_path: InferFastPath,
        general: Route,
    ) -> None:
        """`make` creates a fast path, given its decoder and its error translation."""
        self._make = make
        self._codec = codec
        self._splice = splice
        self._fast_path = fast_path
        self._general = general
        self._fast_paths: BoundedCache[tuple[str | None, ...], Route] = BoundedCache(
            _MAX_FAST_PATHS
        )
        self.placement = fast_path.placement

    def begin(self, stream: ServerStream) -> None:
        """Pass the request to the fast path of its model."""
        key = tuple(map(stream.head.get, ID_HEADERS))
        fast_path = self._fast_paths.get(key)
        if fast_path is None:
            fast_path = self._find(stream.head.fields)
            if sum(len(value or "") for value in key) <= _MAX_KEY_CHARACTERS:
                self._fast_paths.keep(key, fast_path)
        fast_path.begin(stream)

    def _find(self, headers: list[tuple[str, str]]) -> Route:
        metadata = decode_metadata(split_binary_lists(headers))
        try:
            name = model_id(metadata)
        except InvalidRequest:
            return self._general  # the general path reports invalid id headers
        if name is None:
            return self._fast_path
        context = copy_context()
        context.run(bind_contextvars, model_id=name, vmodel_id=vmodel_id(metadata))
        decode = _NamedDecoder(self._codec, name, self._splice)

        def refusal(error: BaseException) -> GRPCError:
            # A copy, because a context cannot be entered twice, and a request that fails
            # immediately is still running in `context`.
            return context.copy().run(refusal_for, mesh_error(error))

        fast_path = self._make(decode=decode, recognise=decode.recognise, refusal=refusal)
        return _FastPathInContext(fast_path, context)


class _NamedDecoder:
    """Decodes requests, replacing their model name by the one from the header."""

    def __init__(self, codec: InferCodec, name: str, splice: Splice) -> None:
        self._decode = codec.decode
        self._recognise = codec.recognise
        self._name = name
        self._splice = splice

    def recognise(self, message: Buffer) -> InferRequest | None:
        """Return the request if its layout is cached and it names this model; otherwise None."""
        request = self._recognise(message)
        return request if request is not None and request.model_name == self._name else None

    def __call__(self, message: Buffer) -> DecodedInfer:
        """Decode a request; raise as the codec does."""
        try:
            decoded = self._decode(message)
        except (MalformedMessage, TooManyFields):
            pass  # the invalid field may be the name, which is replaced below
        else:
            # ModelMesh usually writes the id into the message too; then nothing is replaced.
            if decoded.ordinary and decoded.model_name == self._name:
                return decoded
        return decode_with(self._name, self._splice, self._decode, message)


class _FastPathInContext:
    """Runs a fast path in a context that adds the model ids from the headers to log events."""

    message_first = True

    def __init__(self, fast_path: InferFastPath, context: Context) -> None:
        self._fast_path = fast_path
        self._context = context
        self.placement = fast_path.placement

    def begin(self, stream: ServerStream) -> None:
        """Pass the request to the fast path, within the context."""
        self._context.run(self._fast_path.begin, stream)
