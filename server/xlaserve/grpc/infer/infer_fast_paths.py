"""Chooses the fast path of a ModelInfer from its headers and its model."""

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
from xlaserve.grpc.injection import OF_A_MESH, Splice, decode_with, told_to_a_mesh
from xlaserve.net.bounded_cache import BoundedCache
from xlaserve.serving.call import NOBODY, Peer
from xlaserve.serving.engine import Engine
from xlaserve.serving.gates import Gates
from xlaserve.serving.inference import InferRequest
from xlaserve.serving.repeats import Repeats

_MAX_FAST_PATHS = 256
"""Models, as the headers of a mesh name them, whose fast paths a connection keeps."""
_MAX_KEY_CHARACTERS = 512


class InferFastPaths:
    """The fast paths of one connection, in front of the route of the general path."""

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
        """Without `splice` there is no mesh, and its headers are ignored."""
        self._general = general
        self._compress_answers = compress_answers
        self._codec = codec
        self._splice = splice
        self._make = partial(InferFastPath, engine, gates, codec, general, long, peer=peer)
        self._plain = self._routes(repeats=repeats)
        self._compressing: tuple[Route, Route | None] | None = None
        """Those of compressing clients; None before the first."""

    def _routes(self, **options: Any) -> tuple[Route, Route | None]:
        """Return the fast path, and that for models which the headers of a mesh name."""
        make = partial(self._make, **options)
        fast_path = make()
        if self._splice is None:
            return fast_path, None
        return fast_path, _MeshFastPath(make, self._codec, self._splice, fast_path, self._general)

    def __call__(self, kind: RequestKind[Route]) -> Route:
        """Return the route of the requests with headers of these names."""
        route, mesh = self._plain
        if "grpc-encoding" in kind.places:
            if self._compressing is None:
                self._compressing = self._routes(
                    compresses=True, compress_answers=self._compress_answers
                )
            route, mesh = self._compressing
        if mesh is not None and any(name.startswith(OF_A_MESH) for name in kind.places):
            if any(len(kind.places.get(name, ())) > 1 for name in ID_HEADERS):
                return self._general  # says what is wrong with it
            route = mesh
        return route


class _MeshFastPath:
    """Answers requests for the models that headers name, each in the fast path of its model.

    A fast path is what headers of certain values are decoded to; no request has two of one name.
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
        """`make` makes a fast path with its own decoding and refusals."""
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
        """Begin as the fast path of the model does."""
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
            return self._general  # says so
        if name is None:
            return self._fast_path
        context = copy_context()
        context.run(bind_contextvars, model_id=name, vmodel_id=vmodel_id(metadata))
        decode = _NamedDecoder(self._codec, name, self._splice)

        def refusal(error: BaseException) -> GRPCError:
            # In a copy: a request that is refused at once has begun in the context itself.
            return context.copy().run(refusal_for, told_to_a_mesh(error))

        fast_path = self._make(decode=decode, recognise=decode.recognise, refusal=refusal)
        return _FastPathInContext(fast_path, context)


class _NamedDecoder:
    """Decodes requests for the model that a header names, whatever they say themselves."""

    def __init__(self, codec: InferCodec, name: str, splice: Splice) -> None:
        self._decode = codec.decode
        self._recognise = codec.recognise
        self._name = name
        self._splice = splice

    def recognise(self, message: Buffer) -> InferRequest | None:
        """Return a request with a known layout for this model; else None."""
        request = self._recognise(message)
        return request if request is not None and request.model_name == self._name else None

    def __call__(self, message: Buffer) -> DecodedInfer:
        """Return the request. Raises as the codec does."""
        try:
            decoded = self._decode(message)
        except (MalformedMessage, TooManyFields):
            pass  # it may be the name
        else:
            # A mesh writes the id into the message too; then there is nothing to be put in.
            if decoded.ordinary and decoded.model_name == self._name:
                return decoded
        return decode_with(self._name, self._splice, self._decode, message)


class _FastPathInContext:
    """A fast path whose requests are logged with their model headers."""

    message_first = True

    def __init__(self, fast_path: InferFastPath, context: Context) -> None:
        self._fast_path = fast_path
        self._context = context
        self.placement = fast_path.placement

    def begin(self, stream: ServerStream) -> None:
        """Begin as the fast path does."""
        self._context.run(self._fast_path.begin, stream)
