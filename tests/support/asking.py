"""A gRPC client from a stock package that takes and returns arrays by name."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from support.server import RunningServer


def given(module: Any, name: str, array: "np.ndarray[Any, Any]") -> Any:
    """Return an input tensor of the stock client."""
    tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


class Client:
    """Sends requests to a server over gRPC."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.grpc = triton.InferenceServerClient(server.url)

    async def infer(
        self,
        model: str,
        *,
        wanted: Sequence[str] = (),
        timeout: float | None = None,
        parameters: dict[str, Any] | None = None,
        **inputs: Any,
    ) -> "dict[str, np.ndarray[Any, Any]]":
        """Infer with the inputs given as keywords; return the outputs by name."""
        result: Any = await self.grpc.infer(
            model,
            [given(triton, *one) for one in inputs.items()],
            outputs=[triton.InferRequestedOutput(name) for name in wanted] or None,
            client_timeout=timeout,
            parameters=parameters,
        )
        return {one.name: result.as_numpy(one.name) for one in result.get_response().outputs}

    async def fails(self, model: str, **asked: Any) -> str:
        """Return the status and message of an inference that must fail."""
        with pytest.raises(InferenceServerException) as raised:
            await self.infer(model, **asked)
        return f"{raised.value.status()}: {raised.value.message()}".removeprefix("StatusCode.")

    async def refused(self, model: str, **parameters: Any) -> str:
        """Return the error message of a load that must fail."""
        with pytest.raises(InferenceServerException) as raised:
            await self.grpc.load_model(model, **parameters)
        return str(raised.value.message())

    async def metrics(self) -> str:
        """Return the metrics as Prometheus scrapes them."""
        return await asyncio.to_thread(self._metrics)

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.server.http}/metrics") as answer:
            return str(answer.read().decode())


@asynccontextmanager
async def client(server: RunningServer) -> AsyncIterator[Client]:
    """Connect a client to a server for the duration of a block."""
    asking = Client(server)
    try:
        yield asking
    finally:
        await asking.grpc.close()
