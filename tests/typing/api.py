"""The examples of the README and of docs/client.md, as type checkers see them."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from grpclib._typing import IServable

from xlaserve import Exportable, Models, Service, export_model
from xlaserve.client import AsyncClient, Client


def predict(params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    """Compute the model of the README."""
    return jnp.tanh(x @ params["w"] + params["b"][None])


PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
EXPORTABLE = Exportable(predict, PARAMS, {"x": ("FP32", [-1, 3])}, outputs=["y"])


def export() -> Path:
    """Export as the README does."""
    return export_model(predict, PARAMS, {"x": ("FP32", [-1, 3])}, "models/tiny/1", outputs=["y"])


async def ask(models: Models) -> np.ndarray:
    """Infer as a service does."""
    outputs = await models.infer("tiny", {"x": np.ones((1, 3), np.float32)}, outputs=["y"])
    return outputs["y"]


def create(handler: IServable) -> Service:
    """Make a service as docs/client.md does."""
    return Service(handler=handler, id_paths={"example.digits.Digits/Read": (2, 1)})


def shout() -> list[str]:
    """Infer as docs/python-models.md does."""
    with Client("grpc://localhost:8001") as client:
        answer = client.infer("shouts", {"text": ["cat", "dog"]})
    found: list[str] = answer["shout"]
    return found


async def shout_soon() -> object:
    """Infer in a coroutine, with a content type."""
    async with AsyncClient("http://localhost:8000") as client:
        answer = await client.infer("shouts", {"text": ["cat"]}, outputs={"shout": "base64"})
    return answer.output_parameters["shout"]["content_type"]


def compare(left: np.ndarray, right: np.ndarray) -> list[np.ndarray]:
    """Send and receive trees through shared memory, as docs/client.md does."""
    with Client("unix:/run/xlaserve.sock", shared_memory_bytes=1 << 28) as client:
        answer = client.infer("compared", {"pair": (left, right)})
        why: str = client.not_shared
    assert not why
    each: list[np.ndarray] = answer.tree["each"]
    return each


async def counted() -> list[str]:
    """Read a stream over REST."""
    async with AsyncClient("http+unix:///run/xlaserve-http.sock") as client:
        return [answer.model async for answer in client.stream("counting", {"n": np.array([3])})]
