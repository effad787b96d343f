"""V2 client over REST, for `xlaserve.client` and the command line."""

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from io import BytesIO
from types import MappingProxyType
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.interface import (
    LABELS,
    CallFailed,
    IndexEntry,
    InferenceResult,
    Json,
    ModelTensors,
    NotReached,
    asked,
)
from xlaserve.dialing.rest_stream import events, read_event, write_generate
from xlaserve.errors import UnknownDatatype
from xlaserve.serving.inference import InferRequest, SharedInput
from xlaserve.tensors import (
    BYTES,
    Tensor,
    TensorSpec,
    datatype_named,
    datatype_of,
    from_bytes,
    from_elements,
    to_bytes,
)

_OK = 200
_MEMORY = "/v2/systemsharedmemory"
_NO_WORD_OF_HEALTH = frozenset({401, 403, 404})
"""HTTP statuses of a health check that say nothing about the server's health."""
_STATUSES: Mapping[int, str] = MappingProxyType(
    {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        408: "DEADLINE_EXCEEDED",
        429: "RESOURCE_EXHAUSTED",
        501: "UNIMPLEMENTED",
        502: "UNAVAILABLE",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
    }
)
"""HTTP status -> equivalent gRPC status."""
_SHOWN_BYTES = 300
_JSON_HEADERS: Mapping[str, str] = MappingProxyType({"Content-Type": "application/json"})
_SIZE = "binary_data_size"
_LENGTH = "Inference-Header-Content-Length"


class RestClient:
    """Client of one server over HTTP/1.1; an asynchronous context manager."""

    def __init__(self, address: ServerAddress, *, timeout: float) -> None:
        scheme = "https" if address.tls else "http"
        self._base = f"{scheme}://{address.authority}{address.prefix}"
        self._url = address.url
        self._tls = address.tls
        self._headers = address.headers
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._socket_path = address.socket_path
        self.memory = RestMemory(self._read)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        path = self._socket_path
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path) if path else None,
            timeout=self._timeout,
            headers=self._headers,
        )
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        assert self._session is not None
        await self._session.close()
        failure = self.failure(error)
        if failure is not None:
            raise failure from error

    def failure(self, error: BaseException | None) -> CallFailed | None:
        """Return the CallFailed for a connection or server error; None for other errors."""
        if isinstance(error, CallFailed):
            return None
        problem = _problem(error)
        status = "DEADLINE_EXCEEDED" if isinstance(error, TimeoutError) else "UNAVAILABLE"
        if problem is None:
            return None
        made = CallFailed if isinstance(error, TimeoutError) else NotReached
        return made(self._url, problem, status)

    async def live(self) -> bool:
        """Tell whether the server is live (V2 protocol, Health)."""
        return await self._healthy("/v2/health/live")

    async def ready(self) -> bool:
        """Tell whether the server is ready (V2 protocol, Health)."""
        return await self._healthy("/v2/health/ready")

    async def inputs(self, model: str, version: str = "") -> list[TensorSpec]:
        """Return the inputs of a model (V2 protocol, Model Metadata)."""
        return [*(await self.tensors(model, version)).inputs]

    async def tensors(self, model: str, version: str = "") -> ModelTensors:
        """Return the inputs and outputs of a model (V2 protocol, Model Metadata)."""
        status, _, body = await self._ask("GET", model_path(model, version))
        self._check(status, body)
        try:
            metadata = json.loads(body)
            outputs = metadata.get("outputs", ())
            labelled = [row["name"] for row in outputs if LABELS in (row.get("parameters") or {})]
            return ModelTensors(_specs(metadata["inputs"]), _specs(outputs), frozenset(labelled))
        except (ValueError, KeyError, TypeError, UnknownDatatype) as error:
            raise CallFailed(self._url, f"expected V2 metadata, got {_shown(body)}") from error

    async def infer(
        self, model: str, version: str, inputs: Sequence[tuple[TensorSpec, Tensor]]
    ) -> InferenceResult:
        """Run one inference (V2 protocol, Inference); tensors are sent in the binary form."""
        return await self.ask(asked(model, version, inputs))

    async def ask(self, request: InferRequest, timeout: float | None = None) -> InferenceResult:
        """Run one inference; tensors are sent in the binary form."""
        headers, body = write_request(request)
        started = time.perf_counter()
        path = f"{model_path(request.model_name, request.model_version)}/infer"
        length, data = await self._answer(path, headers, body, timeout)
        seconds = time.perf_counter() - started
        try:
            return _result(data, length, seconds)
        except (ValueError, KeyError, TypeError, UnknownDatatype) as error:
            got = f"{_shown(data)} ({error})"
            raise CallFailed(self._url, f"expected a V2 response, got {got}") from error

    async def stream(
        self, request: InferRequest, timeout: float
    ) -> AsyncGenerator[InferenceResult, None]:
        """Yield the responses to one request (generate extension) as they arrive.

        Events have no datatypes and shapes, so the model's metadata is fetched first.
        """
        assert self._session is not None
        tensors = await self.tensors(request.model_name, request.model_version)
        path = f"{model_path(request.model_name, request.model_version)}/generate_stream"
        started = time.perf_counter()
        async with self._session.post(
            f"{self._base}{path}",
            data=BytesIO(write_generate(request)),
            headers=_JSON_HEADERS,
            ssl=self._tls or True,
            timeout=aiohttp.ClientTimeout(total=timeout),
        ) as response:
            if response.status != _OK:
                # A model's error is formatted as a server-sent event.
                self._check(response.status, (await response.read()).removeprefix(b"data:"))
            try:
                async with aclosing(events(response.content.iter_any())) as found:
                    async for event in found:
                        if isinstance(event.get("error"), str) and "model_name" not in event:
                            raise CallFailed(self._url, event["error"], "UNKNOWN")
                        yield read_event(event, tensors, time.perf_counter() - started)
            except (ValueError, TypeError) as error:
                raise CallFailed(self._url, f"expected a stream of events: {error}") from error

    async def describe(self, model: str, version: str = "") -> Json:
        """Return the metadata of a model (V2 protocol, Model Metadata)."""
        return await self._object("GET", model_path(model, version))

    async def index(self) -> list[IndexEntry]:
        """Return the loaded and loadable models (model repository extension)."""
        rows = await self._read("POST", "/v2/repository/index", {})
        try:
            fields = ("name", "version", "state", "reason")
            return [IndexEntry(*(str(row.get(each) or "") for each in fields)) for row in rows]
        except (AttributeError, TypeError) as error:
            raise CallFailed(self._url, "expected the index to be a list of models") from error

    async def configuration(self, model: str, version: str = "") -> Json:
        """Return the configuration of a model (model configuration extension)."""
        return await self._object("GET", f"{model_path(model, version)}/config")

    async def statistics(self, model: str = "", version: str = "") -> list[Json]:
        """Return the statistics of one model or all models (statistics extension)."""
        path = model_path(model, version) if model else "/v2/models"
        rows = (await self._object("GET", f"{path}/stats")).get("model_stats")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise CallFailed(self._url, "expected the statistics to be a list of models")
        return rows

    async def load(self, model: str, config: str = "") -> None:
        """Load or reload a model; `config` is a JSON configuration to use instead of its own."""
        given = _given({"config": config} if config else None)
        await self._read("POST", _changing(model, "load"), given, expects_json=False)

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Unload a model; with `dependents`, also the steps of an ensemble."""
        given = _given({"unload_dependents": True} if dependents else None)
        await self._read("POST", _changing(model, "unload"), given, expects_json=False)

    async def text(self, path: str) -> str:
        """Send a GET request, and return the body as text."""
        status, _, body = await self._ask("GET", path)
        self._check(status, body)
        return body.decode(errors="replace")

    async def _object(self, method: str, path: str) -> Json:
        found = await self._read(method, path)
        if not isinstance(found, dict):
            raise CallFailed(self._url, f"{path}: expected a JSON object")
        return found

    async def _read(
        self, method: str, path: str, body: Json | None = None, *, expects_json: bool = True
    ) -> Any:
        sent = b"" if body is None else _json(body)
        status, _, answer = await self._ask(method, path, _JSON_HEADERS if sent else None, sent)
        self._check(status, answer)
        if not expects_json:  # the body is empty or an empty object, depending on the server
            return None
        try:
            return json.loads(answer)
        except ValueError as error:
            raise CallFailed(self._url, f"no JSON: {_shown(answer)}") from error

    async def answer(
        self,
        model: str,
        version: str,
        inputs: Sequence[tuple[TensorSpec, Tensor]],
        *,
        binary: bool,
    ) -> tuple[str | None, bytes]:
        """Run one inference; return the header with the JSON's length, if any, and the body."""
        path = f"{model_path(model, version)}/infer"
        return await self._answer(path, *infer_body(inputs, binary=binary))

    async def _answer(
        self, path: str, headers: Mapping[str, str], body: bytes, timeout: float | None = None
    ) -> tuple[str | None, bytes]:
        status, answered, data = await self._ask("POST", path, headers, body, timeout)
        self._check(status, data)
        return answered.get(_LENGTH), data

    async def _healthy(self, path: str) -> bool:
        status, _, body = await self._ask("GET", path)
        if status in _NO_WORD_OF_HEALTH:
            self._check(status, body)
        return status == _OK

    async def _ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout: float | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        assert self._session is not None
        async with self._session.request(
            method,
            f"{self._base}{path}",
            data=BytesIO(body) if body else None,
            headers=headers,
            ssl=self._tls or True,
            timeout=self._timeout if timeout is None else aiohttp.ClientTimeout(total=timeout),
        ) as response:
            return response.status, response.headers, await response.read()

    def _check(self, status: int, body: bytes) -> None:
        if status != _OK:
            raise CallFailed(
                self._url, f"HTTP {status}: {_shown(body)}", _STATUSES.get(status, "UNKNOWN")
            )


def _changing(model: str, verb: str) -> str:
    return f"/v2/repository/models/{quote(model, safe='')}/{verb}"


def _given(parameters: Json | None) -> Json:
    return {"parameters": parameters or {}}


def model_path(model: str, version: str) -> str:
    """Return the path of a model (V2 protocol, Model Metadata)."""
    versioned = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe='')}{versioned}"


def infer_body(
    inputs: Sequence[tuple[TensorSpec, Tensor]], *, binary: bool
) -> tuple[dict[str, str], bytes]:
    """Encode inputs as headers and body (V2 protocol, Inference; binary tensor data extension)."""
    if binary:
        return write_request(asked("", "", inputs))
    rows: list[dict[str, Any]] = []
    for spec, array in inputs:
        datatype = datatype_of(array.dtype) or spec.datatype
        row = {"name": spec.name, "datatype": datatype.name, "shape": list(array.shape)}
        rows.append({**row, "data": _elements(spec, array)})
    return {"Content-Type": "application/json"}, _json({"inputs": rows})


def write_request(request: InferRequest) -> tuple[dict[str, str], bytes]:
    """Encode a request as headers and body; all tensors, also of the response, are binary."""
    rows: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for tensor in request.inputs:
        row: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.name}
        if isinstance(tensor, SharedInput):
            rows.append(row | {"shape": tensor.shape, "parameters": dict(tensor.parameters)})
            continue
        data = bytes(to_bytes(tensor.datatype, tensor.data))
        size = {_SIZE: len(data)}
        parameters = {**tensor.parameters, **size}
        rows.append({**row, "shape": list(tensor.data.shape), "parameters": parameters})
        raw.append(data)
    asks: dict[str, Any] = {"inputs": rows}
    if request.outputs:
        asks["outputs"] = [
            {"name": output.name, "parameters": dict(output.parameters)}
            for output in request.outputs
        ]
    asks["parameters"] = {**request.parameters, "binary_data_output": True}
    head = _json({"id": request.id, **asks} if request.id else asks)
    body = b"".join((head, *raw))
    return {"Content-Type": "application/octet-stream", _LENGTH: str(len(head))}, body


def _specs(rows: Sequence[Mapping[str, Any]]) -> list[TensorSpec]:
    return [
        TensorSpec(row["name"], datatype_named(row["datatype"]), tuple(row["shape"]))
        for row in rows
    ]


def _result(body: bytes, length: str | None, seconds: float) -> InferenceResult:
    end = len(body) if length is None else int(length)
    head = json.loads(body[:end])
    outputs, datatypes, parameters = {}, {}, {}
    for row in head["outputs"]:
        datatype, shape = datatype_named(row["datatype"]), tuple(row["shape"])
        own = dict(row.get("parameters") or {})
        size = own.pop(_SIZE, None)
        if own:
            parameters[row["name"]] = own
        if size is None:
            outputs[row["name"]] = from_elements(datatype, shape, _flat(row["data"]))
        else:
            outputs[row["name"]] = from_bytes(datatype, shape, body[end : end + size])
            end += size
        datatypes[row["name"]] = datatype
    version = head.get("model_version", "")
    return InferenceResult(
        head["model_name"],
        version,
        outputs,
        datatypes,
        seconds,
        head.get("id", ""),
        dict(head.get("parameters") or {}),
        parameters,
    )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list):
        return [element for part in value for element in _flat(part)]
    return [value.encode() if isinstance(value, str) else value]


def _elements(spec: TensorSpec, array: Tensor) -> list[Any]:
    flat: list[Any] = array.ravel().tolist()
    return [element.decode() for element in flat] if spec.datatype is BYTES else flat


class RestMemory:
    """Registers shared memory of this machine with a server (system shared memory extension)."""

    def __init__(self, read: Callable[[str, str, Json | None], Awaitable[Any]]) -> None:
        """`read` sends a request (method, path, body), and returns the JSON of the response."""
        self._read = read

    async def register(self, name: str, key: str, size: int) -> None:
        """Register the shared memory object `key` under a name."""
        path = f"{_MEMORY}/region/{quote(name, safe='')}/register"
        await self._read("POST", path, {"key": key, "offset": 0, "byte_size": size})

    async def unregister(self, name: str) -> None:
        """Unregister a region; an unknown name is not an error."""
        await self._read("POST", f"{_MEMORY}/region/{quote(name, safe='')}/unregister", {})

    async def knows(self, name: str) -> bool:
        """Tell whether the server has a region registered under a name."""
        rows = await self._read("GET", f"{_MEMORY}/status", None)
        return any(isinstance(row, dict) and row.get("name") == name for row in rows)


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _shown(text: bytes) -> str:
    shown = " ".join(text[:_SHOWN_BYTES].decode(errors="replace").split())
    return "".join(c if c.isprintable() else "?" for c in shown) or "no body"


def _problem(error: BaseException | None) -> str | None:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"cannot connect: {error.certificate_error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error}"
    if isinstance(error, aiohttp.ClientError):
        return f"what answers is no HTTP server: {type(error).__name__}"
    return None
