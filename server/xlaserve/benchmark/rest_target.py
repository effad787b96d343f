"""A model of a V2 REST server."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any
from urllib.parse import quote

import aiohttp

from xlaserve.benchmark.errors import BenchmarkRefused, ServerUnreachable
from xlaserve.benchmark.inputs import Inputs
from xlaserve.benchmark.load import Connect, Connection, Load
from xlaserve.benchmark.rest_connection import RestConnection, RestRequest
from xlaserve.tensors import BYTES, Tensor, TensorSpec, datatype_named, datatype_of, to_bytes

_OK = 200
_SHOWN_BYTES = 300


class RestTarget:
    """At `host:port`; tensors travel in the binary form, or as JSON."""

    multiplexes = False

    def __init__(
        self, address: str, model: str, version: str, *, timeout: float, binary: bool
    ) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise BenchmarkRefused(f"--url: expected http://host:port, got 'http://{address}'")
        self._host, self._port = host.strip("[]"), int(port)
        self._address, self._timeout, self._binary = address, timeout, binary
        versioned = f"/versions/{quote(version, safe='')}" if version else ""
        self._path = f"/v2/models/{quote(model, safe='')}{versioned}"

    @property
    def protocol(self) -> str:
        """Return how the tensors travel."""
        return "rest binary" if self._binary else "rest json"

    async def specs(self) -> Sequence[TensorSpec]:
        """Return the inputs of the model (V2 protocol, Model Metadata); raises XlaserveError."""
        async with self._session() as session, session.get(self._url(self._path)) as response:
            text = await response.read()
            self._check(response.status, text)
        try:
            return [
                TensorSpec(row["name"], datatype_named(row["datatype"]), tuple(row["shape"]))
                for row in json.loads(text)["inputs"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerUnreachable(self._address, f"no V2 metadata: {_shown(text)}") from error

    async def probe(self, inputs: Inputs) -> None:
        """Run one inference; raises ServerUnreachable where the answer is an error."""
        headers, body = self._body(inputs)
        async with (
            self._session() as session,
            session.post(
                self._url(f"{self._path}/infer"), data=BytesIO(body), headers=headers
            ) as response,
        ):
            self._check(response.status, await response.read())

    def connector(self, inputs: Inputs) -> Connect:
        """Return what opens HTTP/1.1 connections that ask for this inference."""
        headers, body = self._body(inputs)
        request = RestRequest(self._address, f"{self._path}/infer", headers, body).encode()

        async def connect(load: Load, _streams: int) -> Connection:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(self._timeout):
                    _, connection = await loop.create_connection(
                        lambda: RestConnection(request, load), self._host, self._port
                    )
            except TimeoutError as error:
                raise ServerUnreachable(self._address, "no answer in time") from error
            except OSError as error:
                problem = f"cannot connect: {error.strerror or error}"
                raise ServerUnreachable(self._address, problem) from error
            return connection

        return connect

    def _url(self, path: str) -> str:
        return f"http://{self._address}{path}"

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                yield session
        except TimeoutError as error:
            raise ServerUnreachable(self._address, "no answer in time") from error
        except aiohttp.ClientConnectorError as error:
            problem = f"cannot connect: {error.os_error.strerror or error}"
            raise ServerUnreachable(self._address, problem) from error
        except aiohttp.ClientError as error:
            problem = f"what answers is no HTTP server: {type(error).__name__}"
            raise ServerUnreachable(self._address, problem) from error

    def _check(self, status: int, text: bytes) -> None:
        if status != _OK:
            raise ServerUnreachable(self._address, f"HTTP {status}: {_shown(text)}")

    def _body(self, inputs: Inputs) -> tuple[dict[str, str], bytes]:
        """Return headers and body (V2 protocol, Inference; Binary Tensor Data Extension)."""
        rows: list[dict[str, Any]] = []
        raw = b""
        for spec, array in inputs:
            row = {"name": spec.name, "datatype": spec.datatype.name, "shape": list(array.shape)}
            if self._binary:
                data = bytes(to_bytes(datatype_of(array.dtype) or spec.datatype, array))
                rows.append({**row, "parameters": {"binary_data_size": len(data)}})
                raw += data
            else:
                rows.append({**row, "data": _elements(spec, array)})
        if not self._binary:
            return {"Content-Type": "application/json"}, _json({"inputs": rows})
        head = _json({"inputs": rows, "parameters": {"binary_data_output": True}})
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": str(len(head)),
        }
        return headers, head + raw


def _elements(spec: TensorSpec, array: Tensor) -> list[Any]:
    flat: list[Any] = array.ravel().tolist()
    return [element.decode() for element in flat] if spec.datatype is BYTES else flat


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _shown(text: bytes) -> str:
    return " ".join(text[:_SHOWN_BYTES].decode(errors="replace").split()) or "no body"
