"""A client of V2 servers that reads and writes values by content type, over gRPC and REST.

    with Client("http://localhost:8000") as client:
        answer = client.infer("shouts", {"text": ["cat", "dog"]})
        answer["shout"] -> ["CAT", "DOG"]

`AsyncClient` does the same in coroutines.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType, TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar

import numpy as np

from xlaserve.content_types import (
    CONTENT_TYPES,
    DATA_FRAME,
    columns_of,
    decode_all,
    encode,
    of_value,
)
from xlaserve.core.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.errors import InvalidRequest
from xlaserve.tensors import BYTES, Parameter, Tensor, TensorDataError, datatype_of
from xlaserve.transport.address import ServerAddress, TlsFiles, parse_address
from xlaserve.transport.client import CallFailed, InferenceResult
from xlaserve.transport.dialing import dial

__all__ = ["Answer", "AsyncClient", "CallFailed", "Client", "TlsFiles"]

T = TypeVar("T")
P = ParamSpec("P")

_CONTENT_TYPE = "content_type"
_NO_TEXTS: Mapping[str, str] = MappingProxyType({})
_NONE: Mapping[str, Parameter] = MappingProxyType({})
_NO_FILES = TlsFiles()

Wanted: TypeAlias = Sequence[str] | Mapping[str, str]
"""Outputs by name, or with the content type that each is wanted in; none for all."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one inference; `answer["y"]` is what output y stands for."""

    model: str
    version: str
    id: str
    value: Any = field(repr=False)
    """All outputs by name, or a `pandas.DataFrame` where the answer is one."""
    tensors: Mapping[str, Tensor] = field(repr=False)
    """The outputs as they came."""
    parameters: Mapping[str, Parameter]
    output_parameters: Mapping[str, Mapping[str, Parameter]]
    """Parameters of outputs, by output; only of those that have any."""

    def __getitem__(self, output: str) -> Any:
        return self.value[output]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)


class AsyncClient:
    """Asks one server; an asynchronous context manager. Its methods raise CallFailed."""

    def __init__(
        self,
        url: str | ServerAddress,
        *,
        timeout: float = 30.0,
        tls: TlsFiles = _NO_FILES,
        token: str = "",
    ) -> None:
        """Take `host:port`, `unix:path`, or a URL of grpc, grpcs, http or https.

        `timeout` is in seconds, for each call; `token` is shown with each. Raises an
        InvalidRequest for what is no address.
        """
        address = parse_address(url, tls, token) if isinstance(url, str) else url
        self._url = address.url
        self._dialled = dial(address, timeout=timeout)

    async def __aenter__(self) -> Self:
        await self._dialled.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._dialled.__aexit__(None, None, None)

    async def live(self) -> bool:
        """Tell whether the server is live (V2 protocol, Health)."""
        return await self._told(self._dialled.live())

    async def ready(self) -> bool:
        """Tell whether the server is ready (V2 protocol, Health)."""
        return await self._told(self._dialled.ready())

    async def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Wanted = (),
        content_type: str = "",
        content_types: Mapping[str, str] = _NO_TEXTS,
        id: str = "",
        parameters: Mapping[str, Parameter] = _NONE,
    ) -> Answer:
        """Return the answer of a model to values by input, or to a `pandas.DataFrame`.

        `content_types` are those of inputs, by input; others have `content_type`, or the one that
        follows from their value: lists of `str`, `bytes` and `datetime`, a `dict`, or an array.
        Outputs are read by the content types that the answer says, or are arrays. Raises an
        InvalidRequest that names the tensor for what cannot be written, and CallFailed.
        """
        made = request(
            model,
            inputs,
            version=version,
            outputs=outputs,
            content_type=content_type,
            content_types=content_types,
            id=id,
            parameters=parameters,
        )
        result = await self._told(self._dialled.ask(made))
        try:
            return _answer(result)
        except ValueError as error:  # also of columns that make no frame
            raise CallFailed(self._url, f"the answer of model '{model}': {error}") from error

    async def _told(self, asking: Coroutine[Any, Any, T]) -> T:
        try:
            return await asking
        except Exception as error:
            failure = self._dialled.failure(error)
            if failure is None:
                raise
            raise failure from error


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    """Return a method of Client that does what one of AsyncClient does, and blocks."""

    @wraps(method)
    def call(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        asking, loop = client.opened()
        return loop.run(method(asking, *args, **kwargs))

    return call


class Client:
    """Does what AsyncClient does for code that is no coroutine; a context manager.

    It has an event loop of its own, in a thread: any number of threads may ask at a time.
    """

    def __init__(
        self, url: str, *, timeout: float = 30.0, tls: TlsFiles = _NO_FILES, token: str = ""
    ) -> None:
        """Take the same as AsyncClient."""
        self._address = parse_address(url, tls, token)
        self._timeout = timeout
        self._open: tuple[AsyncClient, _Loop] | None = None

    def __enter__(self) -> Self:
        loop = _Loop()
        try:
            self._open = loop.run(self._dialled()), loop
        except BaseException:
            loop.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        client, loop = self.opened()
        self._open = None
        try:
            loop.run(client.__aexit__(None, None, None))
        finally:
            loop.close()

    live = _blocking(AsyncClient.live)
    ready = _blocking(AsyncClient.ready)
    infer = _blocking(AsyncClient.infer)

    def opened(self) -> "tuple[AsyncClient, _Loop]":
        """Return the client and its loop; raises a RuntimeError outside of the block."""
        if self._open is None:
            raise RuntimeError("the client is not open: use it as a context manager")
        return self._open

    async def _dialled(self) -> AsyncClient:
        return await AsyncClient(self._address, timeout=self._timeout).__aenter__()


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="xlaserve client", daemon=True
        )
        self._thread.start()

    def run(self, asking: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asking, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def request(
    model: str,
    inputs: Any,
    *,
    version: str = "",
    outputs: Wanted = (),
    content_type: str = "",
    content_types: Mapping[str, str] = _NO_TEXTS,
    id: str = "",
    parameters: Mapping[str, Parameter] = _NONE,
) -> InferRequest:
    """Return the request that `infer` sends; raises an InvalidRequest that names the tensor."""
    own = dict(parameters)
    is_frame = hasattr(inputs, "columns")
    if is_frame or content_type:
        own[_CONTENT_TYPE] = DATA_FRAME if is_frame else content_type
    try:
        values: Mapping[str, Any] = columns_of(inputs) if is_frame else inputs
    except TensorDataError as error:
        raise InvalidRequest(f"model '{model}': {error}") from error
    wanted = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs, "")
    return InferRequest(
        model,
        version,
        id,
        tuple(
            _input(model, name, value, content_types.get(name, content_type), in_frame=is_frame)
            for name, value in values.items()
        ),
        tuple(
            RequestedOutput(name, {_CONTENT_TYPE: kind} if kind else {})
            for name, kind in wanted.items()
        ),
        own,
    )


def _input(model: str, name: str, value: Any, kind: str, *, in_frame: bool) -> InferInput:
    try:
        if in_frame:
            # Columns of texts have a content type, numbers have none, as MLServer writes them.
            of_tensor = {_CONTENT_TYPE: "str"} if value.dtype.hasobject else {}
            return _tensor(model, name, value, of_tensor)
        kind = kind if kind and kind != DATA_FRAME else of_value(value)
        tensor = value if isinstance(value, np.ndarray) else encode(value, kind)
    except TensorDataError as error:
        raise InvalidRequest(f"model '{model}', input '{name}': {error}") from error
    return _tensor(model, name, tensor, {_CONTENT_TYPE: kind})


def _tensor(
    model: str, name: str, tensor: Tensor, parameters: Mapping[str, Parameter]
) -> InferInput:
    if tensor.dtype.kind in "SU":
        tensor = tensor.astype(np.object_)
    datatype = BYTES if tensor.dtype.hasobject else datatype_of(tensor.dtype)
    if datatype is None:
        expected = "an array of a datatype of the protocol"
        raise InvalidRequest(
            f"model '{model}', input '{name}': expected {expected}, got {tensor.dtype}"
        )
    return InferInput(name, datatype, tensor, parameters)


def _answer(result: InferenceResult) -> Answer:
    """Return an answer by its content types; raises ValueError for one that is not what it says."""
    said = {name: str(one.get(_CONTENT_TYPE)) for name, one in result.output_parameters.items()}
    kinds = {name: kind for name, kind in said.items() if kind in CONTENT_TYPES}
    of_answer = DATA_FRAME if result.parameters.get(_CONTENT_TYPE) == DATA_FRAME else ""
    return Answer(
        result.model,
        result.version,
        result.id,
        decode_all(result.outputs, kinds, of_answer),
        result.outputs,
        result.parameters,
        result.output_parameters,
    )
