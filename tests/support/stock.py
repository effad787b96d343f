"""A common interface to Triton's four stock clients: gRPC and HTTP, blocking and asyncio."""

import asyncio
import inspect
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from support.server import RunningServer

KINDS = ("grpc", "http", "grpc.aio", "http.aio")


class Stock:
    """One of the clients; all methods are coroutines."""

    def __init__(self, kind: str, client: Any, threads: ThreadPoolExecutor) -> None:
        self.kind = kind
        self.client = client
        self._threads = threads
        self.module: ModuleType = tritonclient.grpc if "grpc" in kind else tritonclient.http

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the client, on a thread if it blocks."""
        call = getattr(self.client, method)
        if self.kind.endswith("aio"):
            found = call(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found
        return await self._in_thread(call, *args, **kwargs)

    async def _in_thread(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))

    def input(self, *args: Any) -> Any:
        """Create an InferInput."""
        return self.module.InferInput(*args)

    def output(self, name: str, **kwargs: Any) -> Any:
        """Create an InferRequestedOutput."""
        return self.module.InferRequestedOutput(name, **kwargs)

    async def fault(self, method: str, *args: Any, **kwargs: Any) -> str:
        """Return the error message of a call that must fail."""
        try:
            await self.ask(method, *args, **kwargs)
        except InferenceServerException as error:
            return str(error.message())
        raise AssertionError(f"{method} succeeded")


@asynccontextmanager
async def stock_client(kind: str, server: RunningServer) -> AsyncIterator[Stock]:
    """Connect a stock client for the duration of a block."""
    module = {
        "grpc": tritonclient.grpc,
        "http": tritonclient.http,
        "grpc.aio": tritonclient.grpc.aio,
        "http.aio": tritonclient.http.aio,
    }[kind]
    url = server.url if "grpc" in kind else server.http
    # The blocking HTTP client must be used from the thread that created it.
    with ThreadPoolExecutor(1 if kind == "http" else 4) as threads:
        if kind.endswith("aio"):
            client = module.InferenceServerClient(url)
        else:
            client = await asyncio.wrap_future(threads.submit(module.InferenceServerClient, url))
        try:
            yield Stock(kind, client, threads)
        finally:
            if kind.endswith("aio"):
                await client.close()
            else:
                await asyncio.wrap_future(threads.submit(client.close))
