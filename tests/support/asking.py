"""A stock client that asks a server by arrays and names."""

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
    """Return an input of a stock client."""
    tensor = module.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


class Client:
    """Asks a server over gRPC."""

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
        """Return the outputs by name; inputs are keywords."""
        result: Any = await self.grpc.infer(
            model,
            [given(triton, *one) for one in inputs.items()],
            outputs=[triton.InferRequestedOutput(name) for name in wanted] or None,
            client_timeout=timeout,
            parameters=parameters,
        )
        return {one.name: result.as_numpy(one.name) for one in result.get_response().outputs}

    async def fails(self, model: str, **asked: Any) -> str:
        """Return status and text of an inference that fails."""
        with pytest.raises(InferenceServerException) as raised:
            await self.infer(model, **asked)
        return f"{raised.value.status()}: {raised.value.message()}".removeprefix("StatusCode.")

    async def refused(self, model: str, **parameters: Any) -> str:
        """Return the text of a load that fails."""
        with pytest.raises(InferenceServerException) as raised:
            await self.grpc.load_model(model, **parameters)
        return str(raised.value.message())

    async def metrics(self) -> str:
        """Return what Prometheus would read."""
        return await asyncio.to_thread(self._metrics)

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.server.http}/metrics") as answer:
            return str(answer.read().decode())


@asynccontextmanager
async def client(server: RunningServer) -> AsyncIterator[Client]:
    """Ask a server for the length of a block."""
    asking = Client(server)
    try:
        yield asking
    finally:
        await asking.grpc.close()
