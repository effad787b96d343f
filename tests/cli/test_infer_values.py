"""`xlaserve infer --input`: words in the place of values, and what is no value."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.doubling import export_double
from support.server import RunningServer, serving
from typer.testing import CliRunner

from xlaserve.cli import application

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    root = tmp_path_factory.mktemp("models")
    export_double(root)
    scratch = tmp_path_factory.mktemp("scratch")
    # In threads the server has nothing to say of the model: its log would be beside the answer.
    settings: dict[str, Any] = {"load_model": ("double",), "inline_execution_seconds": 0.0}
    async with serving(scratch, root, **settings) as found:
        yield found


async def infer(server: RunningServer, value: str) -> tuple[str, str]:
    """Return what the command prints, and its error; in a thread, it has an event loop."""

    def invoke() -> tuple[str, str]:
        arguments = ["infer", "double", f"--input=x={value}", "--json", "--url", server.url]
        result = CliRunner().invoke(application(), arguments)
        return result.output, str(result.exception or "")

    return await asyncio.to_thread(invoke)


async def values(server: RunningServer, value: str) -> Any:
    output, error = await infer(server, value)
    assert "" == error
    return json.loads(output)["outputs"]


async def test_zeros_and_random_are_one_row(server: RunningServer) -> None:
    zeros, random, again = [await values(server, word) for word in ("zeros", "random", "random")]
    (given,) = [one["data"] for one in zeros]
    (drawn,) = [one["data"] for one in random]

    assert [[0.0, 0.0]] == np.reshape(given, (1, 2)).tolist()
    assert np.asarray(drawn).size == 2
    assert np.all(np.asarray(drawn) > 0)
    assert random == again


@pytest.mark.parametrize("wrong", ["1,2", "zeroes", "[1,"])
async def test_what_is_no_value_says_what_is(server: RunningServer, wrong: str) -> None:
    _, error = await infer(server, wrong)

    assert (
        "input 'x': expected JSON, such as [[1,2]], @FILE.npy, zeros or random,"
        f" got '{wrong}'" in error
    )
