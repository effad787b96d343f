"""A client that speaks to a model runtime the way a ModelMesh sidecar does, on plain grpcio."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

import grpc

from support.protobuf import Google

_PREDICT_SECONDS = 0.5
_SIZE_SECONDS = 30
_STATUS_SECONDS = 180
_MANAGEMENT_BYTES = 4 << 20
_SERVING_BYTES = 16 << 20
_HEADER_BYTES = 8192
_NOT_PASSED_ON = ("mm-", "grpc-", "tas-model-id", "content-type", "user-agent")

Outcome = tuple[str, str]
"""The name of a status, and its text."""


@cache
def messages() -> Google:
    """Return Google's classes of the contracts."""
    return Google()


def message(name: str, **values: Any) -> Any:
    """Make a message by its full name, as `inference.ModelInferRequest`."""
    return messages().named(name)(**values)


async def outcome(call: Any) -> Outcome:
    """Wait for a call to end, well or badly."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def code(call: Any) -> str:
    """Wait for a call to end and return the name of its status."""
    return (await outcome(call))[0]


def lost(answer: Outcome) -> bool:
    """Tell whether the mesh takes an answer to mean that the runtime does not have the model.

    Besides NOT_FOUND it knows two texts by which other servers say so with another code.
    """
    status, text = answer
    triton = text.startswith("Request for unknown model") and text.endswith(
        (" is not found", " has no available versions")
    )
    mlserver = text.startswith("Model ") and text.endswith(" not found")
    return (
        status == "NOT_FOUND"
        or (status == "UNAVAILABLE" and triton)
        or (status == "INVALID_ARGUMENT" and mlserver)
    )


class Mesh:
    """One sidecar: a channel to manage models, and one, often the same, to reach them."""

    def __init__(self, management: Any, serving: Any) -> None:
        self._management = management
        self._serving = serving
        self.paths: Mapping[str, Sequence[int]] = {}
        """Method -> where the id goes, as runtimeStatus said."""

    # --- management ---

    async def status(self) -> Any:
        """Ask once, and keep the paths of an answer that is READY."""
        answer = await self._manage("runtimeStatus", "RuntimeStatus", _STATUS_SECONDS)
        if answer.status == answer.READY:
            infos = answer.methodInfos
            self.paths = {name: list(infos[name].idInjectionPath) for name in infos}
        return answer

    def load(self, model: str, path: object, key: str = "", kind: str = "mt:jax:1") -> Any:
        """Start a load, without a deadline; `cancel()` on the call resets its stream."""
        return self._manage("loadModel", "LoadModel", None, **_model(model, path, key, kind))

    def unload(self, model: str) -> Any:
        """Start an unload, without a deadline."""
        return self._manage("unloadModel", "UnloadModel", None, modelId=model)

    def predict(self, model: str, path: object, key: str = "", kind: str = "mt:jax:1") -> Any:
        """Ask what a model will take."""
        fields = _model(model, path, key, kind)
        return self._manage("predictModelSize", "PredictModelSize", _PREDICT_SECONDS, **fields)

    def size(self, model: str) -> Any:
        """Ask what a model takes."""
        return self._manage("modelSize", "ModelSize", _SIZE_SECONDS, modelId=model)

    def _manage(self, method: str, name: str, timeout: float | None, **values: Any) -> Any:
        call = self._management.unary_unary(
            f"/mmesh.ModelRuntime/{method}",
            request_serializer=messages().named(f"mmesh.{name}Request").SerializeToString,
            response_deserializer=messages().named(f"mmesh.{name}Response").FromString,
        )
        return call(message(f"mmesh.{name}Request", **values), timeout=timeout)

    # --- inference ---

    def infer(self, model: str, request: Any, **more: Any) -> Any:
        """Pass a request on to a model; see `call`."""
        return self.call("ModelInfer", model, request, **more)

    def call(
        self,
        method: str,
        model: str,
        request: Any,
        *,
        timeout: float | None = None,
        headers: Sequence[tuple[str, str | bytes]] = (),
    ) -> Any:
        """Pass a client's request, a message or bytes, on to the model of an id.

        Headers of the mesh are replaced, those of transports are dropped, the id is written into
        the message where the runtime wants it. Methods that it did not name are not passed on.
        """
        full = f"inference.GRPCInferenceService/{method}"
        data = request if isinstance(request, bytes) else request.SerializeToString()
        if self.paths[full]:
            data = splice(data, self.paths[full], model.encode())
        kept = [(name, value) for name, value in headers if not name.startswith(_NOT_PASSED_ON)]
        return self.raw(method, data, timeout=timeout, headers=[*kept, *id_headers(model)])

    def raw(
        self,
        method: str,
        data: bytes,
        *,
        timeout: float | None = None,
        headers: Sequence[tuple[str, str | bytes]] = (),
    ) -> Any:
        """Send bytes with these headers, as they are."""
        call = self._serving.unary_unary(
            f"/inference.GRPCInferenceService/{method}",
            response_deserializer=messages().named(f"inference.{method}Response").FromString,
        )
        return call(data, timeout=timeout, metadata=headers)


def _model(model: str, path: object, key: str, kind: str) -> dict[str, str]:
    return {"modelId": model, "modelType": kind, "modelPath": str(path), "modelKey": key}


@asynccontextmanager
async def dial(management: str, serving: str = "") -> AsyncIterator[Mesh]:
    """Connect as a sidecar does: one channel where both addresses are the same."""
    async with AsyncExitStack() as stack:
        shared = serving in ("", management)
        limit = _SERVING_BYTES if shared else _MANAGEMENT_BYTES
        first = await stack.enter_async_context(_channel(management, limit))
        second = first
        if not shared:
            second = await stack.enter_async_context(_channel(serving, _SERVING_BYTES))
        yield Mesh(first, second)


def _channel(address: str, max_bytes: int) -> Any:
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", _HEADER_BYTES),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if address.startswith("unix:"):
        options.append(("grpc.default_authority", address.removeprefix("unix:")))
    return grpc.aio.insecure_channel(address, options=options)


def id_headers(model: str) -> list[tuple[str, str | bytes]]:
    """Return the headers in which the mesh sends an id: in base64, and in ASCII if it is that."""
    headers: list[tuple[str, str | bytes]] = [("mm-model-id-bin", model.encode())]
    if all(32 <= ord(character) <= 126 for character in model):
        headers.append(("mm-model-id", model))
    return headers


# --- injection ---------------------------------------------------------------------------------


def splice(data: bytes, path: Sequence[int], value: bytes) -> bytes:
    """Write an id into a serialized message the way the mesh does.

    The first occurrence of the field is replaced, later ones stay; a field that is not there comes
    last. Raises ValueError where the field is not length-delimited.
    """
    number, *rest = path
    for start, stop, found, body in _fields(data):
        if found != number:
            continue
        if body is None:
            raise ValueError(f"field {number} is not length-delimited")
        inner = splice(body, rest, value) if rest else value
        return data[:start] + _field(number, inner) + data[stop:]
    return data + _field(number, splice(b"", rest, value) if rest else value)


def _fields(data: bytes) -> Iterator[tuple[int, int, int, bytes | None]]:
    """Yield where a field starts and stops, its number, and its bytes if its type has a length."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        body = None
        if kind == 0:
            _, at = _read_varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            size, at = _read_varint(data, at)
            body = data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {kind}")
        if at > len(data):
            raise ValueError("the message is cut off")
        yield start, at, number, body


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        octet = data[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, at
        shift += 7


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*octets, value))
