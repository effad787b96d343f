"""The four stock clients of Triton behind one way to call them: gRPC and HTTP, with and without
asyncio."""

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
    """One of the clients; every method is awaited, whether it blocks or not."""

    def __init__(self, kind: str, client: Any, threads: ThreadPoolExecutor) -> None:
        self.kind = kind
        self.client = client
        self._threads = threads
        self.module: ModuleType = tritonclient.grpc if "grpc" in kind else tritonclient.http

    async def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the client, in a thread where it blocks."""
        call = getattr(self.client, method)
        if self.kind.endswith("aio"):
            found = call(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found
        return await self._in_thread(call, *args, **kwargs)

    async def _in_thread(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(call, *args, **kwargs))

    def input(self, *args: Any) -> Any:
        """Make an InferInput."""
        return self.module.InferInput(*args)

    def output(self, name: str, **kwargs: Any) -> Any:
        """Make an InferRequestedOutput."""
        return self.module.InferRequestedOutput(name, **kwargs)

    async def fault(self, method: str, *args: Any, **kwargs: Any) -> str:
        """Return the text of the error of a call, which must fail."""
        try:
            await self.ask(method, *args, **kwargs)
        except InferenceServerException as error:
            return str(error.message())
        raise AssertionError(f"{method} succeeded")


@asynccontextmanager
async def stock_client(kind: str, server: RunningServer) -> AsyncIterator[Stock]:
    """Connect a stock client to a server for the length of a block."""
    module = {
        "grpc": tritonclient.grpc,
        "http": tritonclient.http,
        "grpc.aio": tritonclient.grpc.aio,
        "http.aio": tritonclient.http.aio,
    }[kind]
    url = server.url if "grpc" in kind else server.http
    # That of HTTP without asyncio belongs to the thread that made it.
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
