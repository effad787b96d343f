"""Writes Python models into test repositories."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any, TypeAlias

from support import asking
from support.asking import Client
from support.server import Serve

Start: TypeAlias = Callable[..., AbstractAsyncContextManager[Client]]

OWN = "from xlaserve import Context, InferenceError, PythonModel, Request\nimport numpy as np\n\n"
"""First lines of a model.py with our own interface."""

VECTORS = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ -1 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ -1 ] }]
"""
"""Configuration with one input and one output vector of any length."""


def write(
    root: Path,
    name: str,
    code: str,
    config: str = "",
    beside: Mapping[str, str] | None = None,
    begin: str = OWN,
) -> Path:
    """Write a model and return its version directory; `beside` are additional files there."""
    version = root / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    for file, text in {"model.py": begin + dedent(code), **(beside or {})}.items():
        (version / file).parent.mkdir(parents=True, exist_ok=True)
        (version / file).write_text(text)
    if config:
        (root / name / "config.pbtxt").write_text(f'backend: "python"\n{config}')
    return version


def write_function(root: Path, name: str, body: str, config: str = VECTORS) -> Path:
    """Write a model whose `infer` has this body, in which `x` is the input."""
    lines = "\n".join("        " + line for line in dedent(body).strip().splitlines())
    begin = "class Model(PythonModel):\n    def infer(self, inputs):\n        x = inputs['x']\n"
    return write(root, name, f"{begin}{lines}\n", config)


def starting(serve: Serve, root: Path) -> Start:
    """Return a function that runs a server with Python models enabled and all models loaded.

    The function is a context manager that yields a client.
    """

    @asynccontextmanager
    async def run(load: str = "*", **settings: Any) -> AsyncIterator[Client]:
        defaults = {"load_model": (load,), "allow_python_models": True}
        async with serve(root, **defaults | settings) as server, asking.client(server) as client:
            yield client

    return run
