"""A client of V2 servers that converts values by content type, over gRPC and REST.

    with Client("http://localhost:8000") as client:
        answer = client.infer("shouts", {"text": ["cat", "dog"]})
        answer["shout"] -> ["CAT", "DOG"]

`AsyncClient` does the same in coroutines.
"""

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextlib import aclosing
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from xlaserve.client.memory import SharedInputs
from xlaserve.client.values import NO_PARAMETERS, NO_TEXTS, Answer, Wanted, answer_of, request
from xlaserve.dialing.address import ServerAddress, TlsFiles, parse_address
from xlaserve.dialing.dial import dial
from xlaserve.dialing.interface import CallFailed, IndexEntry, InferenceResult, Json
from xlaserve.serving.inference import InferRequest
from xlaserve.tensors import Parameter

__all__ = ["Answer", "AsyncClient", "CallFailed", "Client", "IndexEntry", "TlsFiles", "request"]

T = TypeVar("T")
P = ParamSpec("P")

_NO_FILES = TlsFiles()
_RETRIED = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
"""Statuses that are retried: the server is starting, draining or shedding load."""
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 5.0
"""Initial and maximum backoff between retries, in seconds."""
_SEQUENCE = "sequence_id"


class AsyncClient:
    """Client of one server; an asynchronous context manager. Its methods raise CallFailed."""

    def __init__(
        self,
        url: str | ServerAddress,
        *,
        timeout: float = 30.0,
        tls: TlsFiles = _NO_FILES,
        token: str = "",
        retries: int = 0,
        shared_memory_bytes: int = 0,
    ) -> None:
        """`url` is `host:port`, `unix:path`, or has a scheme: grpc, grpcs, http, https, http+unix.

        `timeout` is in seconds and applies to each call, including retries. `token` is sent as
        bearer token with each call. An inference that fails because the server is unavailable or
        exhausted is retried up to `retries` times with exponential backoff, except in a sequence,
        because the server may have executed it. With `shared_memory_bytes`, large inputs of `infer`
        are passed in up to that much shared memory if the server is on this machine and allows it.
        Raises InvalidRequest if `url` is invalid.
        """
        self._timeout = timeout
        self._retries = retries
        address = parse_address(url, tls, token) if isinstance(url, str) else url
        self._url = address.url
        self._dialled = dial(address, timeout=timeout)
        self._shared = SharedInputs(self._dialled, address, shared_memory_bytes)

    async def __aenter__(self) -> Self:
        await self._dialled.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        try:
            await self._shared.close()
        finally:
            await self._dialled.__aexit__(None, None, None)

    @property
    def not_shared(self) -> str:
        """Return why inputs are not sent in shared memory, or an empty string if they are."""
        return self._shared.problem

    async def live(self) -> bool:
        """Tell whether the server is live (V2 protocol, Health)."""
        return await self._translating_errors(self._dialled.live())

    async def ready(self) -> bool:
        """Tell whether the server is ready (V2 protocol, Health)."""
        return await self._translating_errors(self._dialled.ready())

    async def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Wanted = (),
        content_type: str = "",
        content_types: Mapping[str, str] = NO_TEXTS,
        id: str = "",
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
        timeout: float | None = None,
    ) -> Answer:
        """Run one inference; `inputs` maps input names to values, or is a `pandas.DataFrame`.

        `content_types` maps inputs to content types. Other inputs have `content_type` or, without
        one, the type that follows from the value: a list of `str`, `bytes` or `datetime`, a `dict`,
        or an array. A dict, list or tuple of arrays stands for several inputs: `{"pair": (a, b)}`
        is `pair.0` and `pair.1`; `answer.tree` does the reverse for outputs.
        Outputs are decoded by the content types in the response, or are arrays. `timeout` is in
        seconds and overrides the client's. Raises CallFailed, or InvalidRequest, naming the
        tensor, for a value that cannot be encoded.
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
        return self._answer(await self._retried(made, timeout or self._timeout))

    async def stream(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
        timeout: float | None = None,
    ) -> AsyncGenerator[Answer, None]:
        """Yield the responses of a decoupled model to one request as they arrive.

        `timeout` is in seconds, for all responses together. Closing the generator cancels the
        request. Raises the same errors as `infer`.
        """
        made = request(model, inputs, version=version, id=id, parameters=parameters)
        try:
            async with aclosing(self._dialled.stream(made, timeout or self._timeout)) as results:
                async for result in results:
                    yield self._answer(result)
        except Exception as error:
            failure = self._dialled.failure(error)
            if failure is None:
                raise
            raise failure from error

    async def metadata(self, model: str, version: str = "") -> Json:
        """Return the metadata of a model (V2 protocol, Model Metadata)."""
        return await self._translating_errors(self._dialled.describe(model, version))

    async def configuration(self, model: str, version: str = "") -> Json:
        """Return the configuration of a model (model configuration extension)."""
        return await self._translating_errors(self._dialled.configuration(model, version))

    async def statistics(self, model: str = "", version: str = "") -> list[Json]:
        """Return the statistics of one model or all models (statistics extension)."""
        return await self._translating_errors(self._dialled.statistics(model, version))

    async def index(self) -> list[IndexEntry]:
        """Return the loaded and loadable models (model repository extension)."""
        return await self._translating_errors(self._dialled.index())

    async def load(self, model: str, config: str = "") -> None:
        """Load or reload a model; `config` is a JSON configuration to use instead of its own."""
        await self._translating_errors(self._dialled.load(model, config))

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Unload a model; with `dependents`, also the steps of an ensemble."""
        await self._translating_errors(self._dialled.unload(model, dependents=dependents))

    def _answer(self, result: InferenceResult) -> Answer:
        try:
            return answer_of(result)
        except ValueError as error:  # includes columns that do not form a DataFrame
            model = result.model
            raise CallFailed(self._url, f"the answer of model '{model}': {error}") from error

    async def _retried(self, made: InferRequest, timeout: float) -> InferenceResult:
        """Send a request, with retries, until it is answered or the timeout expires."""
        deadline = asyncio.get_running_loop().time() + timeout
        placed, region = await self._translating_errors(self._shared.placed(made))
        if region is None:
            return await self._until(made, deadline)
        try:
            answer = await self._until(placed, deadline)
        except CallFailed as error:
            # A server that was restarted does not know the region, and rejects the request without
            # executing it: send the inputs over the connection.
            if error.status != "INVALID_ARGUMENT" or not await self._shared.lost(region):
                self._shared.give_back(region)
                raise
            return await self._until(made, deadline)
        except BaseException:
            self._shared.give_back(region)
            raise
        self._shared.give_back(region)
        return answer

    async def _until(self, made: InferRequest, deadline: float) -> InferenceResult:
        now = asyncio.get_running_loop().time
        left = 0 if _SEQUENCE in made.parameters else self._retries
        wait = _FIRST_WAIT
        while True:
            try:
                return await self._translating_errors(
                    self._dialled.ask(made, max(deadline - now(), 0.001))
                )
            except CallFailed as error:
                # Jitter, so that clients that failed together do not retry together.
                pause = wait * (0.5 + random.random() / 2)
                if not left or error.status not in _RETRIED or now() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            left, wait = left - 1, min(2 * wait, _LONGEST_WAIT)

    async def _translating_errors(self, asking: Coroutine[Any, Any, T]) -> T:
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
    """Turn a method of AsyncClient into a blocking method of Client."""

    @wraps(method)
    def call(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        asking, loop = client.opened()
        return loop.run(method(asking, *args, **kwargs))

    return call


class Client:
    """Blocking version of AsyncClient; a context manager.

    It runs an event loop in a background thread, and may be used by any number of threads.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        tls: TlsFiles = _NO_FILES,
        token: str = "",
        retries: int = 0,
        shared_memory_bytes: int = 0,
    ) -> None:
        """The arguments are the same as those of AsyncClient."""
        self._retries = retries
        self._shared_memory_bytes = shared_memory_bytes
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

    def __exit__(self, *raised: object) -> None:
        client, loop = self.opened()
        self._open = None
        try:
            loop.run(client.__aexit__(None, None, None))
        finally:
            loop.close()

    @property
    def not_shared(self) -> str:
        """Return why inputs are not sent in shared memory, or an empty string if they are."""
        return self.opened()[0].not_shared

    live = _blocking(AsyncClient.live)
    ready = _blocking(AsyncClient.ready)
    infer = _blocking(AsyncClient.infer)
    metadata = _blocking(AsyncClient.metadata)
    configuration = _blocking(AsyncClient.configuration)
    statistics = _blocking(AsyncClient.statistics)
    index = _blocking(AsyncClient.index)
    load = _blocking(AsyncClient.load)
    unload = _blocking(AsyncClient.unload)

    def stream(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        id: str = "",
        parameters: Mapping[str, Parameter] = NO_PARAMETERS,
        timeout: float | None = None,
    ) -> Generator[Answer, None, None]:
        """Yield answers as `AsyncClient.stream` does, blocking until the next one arrives."""
        client, loop = self.opened()
        answers = client.stream(
            model, inputs, version=version, id=id, parameters=parameters, timeout=timeout
        )

        async def _next() -> Answer | None:
            return await anext(answers, None)

        async def _close() -> None:
            await answers.aclose()

        try:
            while (answer := loop.run(_next())) is not None:
                yield answer
        finally:
            loop.run(_close())

    def opened(self) -> "tuple[AsyncClient, _Loop]":
        """Return the client and its loop; raise RuntimeError if the context was not entered."""
        if self._open is None:
            raise RuntimeError("the client is not open: use it as a context manager")
        return self._open

    async def _dialled(self) -> AsyncClient:
        return await AsyncClient(
            self._address,
            timeout=self._timeout,
            retries=self._retries,
            shared_memory_bytes=self._shared_memory_bytes,
        ).__aenter__()


class _Loop:
    """An event loop in a background thread."""

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
