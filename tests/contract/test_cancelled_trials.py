"""A cancelled load whose trial process is still running with files sent by a client."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton
from support.conditions import MOST_SECONDS, until
from support.identity_models import write
from support.server import Serve

from xlaserve.runtime import trial

HANGS = """
import os, pathlib, time
pathlib.Path({path!r}, str(os.getpid())).touch()
time.sleep(3600)
"""
"""Source of a trial process that reports its id and never exits."""
FILE = {"file:1/sent.jaxexp": b"a file of a model"}
CONFIG = json.dumps({"max_batch_size": 0})


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make trial processes hang; return the directory in which each writes its id."""
    began = tmp_path / "began"
    began.mkdir()
    command = (sys.executable, "-c", HANGS.format(path=str(began)))
    defaults = trial.try_loading.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "command", command)
    return began


def alive(began: Path) -> Iterator[int]:
    """Yield the trial processes that are still running."""
    for file in began.iterdir():
        if Path("/proc", file.name).exists():
            yield int(file.name)


async def test_its_process_ends_with_it(trials: Path, serve: Serve, tmp_path: Path) -> None:
    """The cancelled load's only thread is free for other loads again."""
    root = tmp_path / "models"
    write(root, "other", "FP32")
    async with (
        serve(root, load_threads=1, trial_seconds=3600) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        loading = asyncio.ensure_future(client.load_model("sent", config=CONFIG, files=FILE))
        await until(lambda: any(alive(trials)))
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await until(lambda: not any(alive(trials)))
        async with asyncio.timeout(MOST_SECONDS):
            await client.load_model("other")
        is_ready = await client.is_model_ready("other")

    assert is_ready
    assert 1 == len(list(trials.iterdir()))
