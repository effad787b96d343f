"""The server starts from a source tree, without an installed distribution."""

import asyncio
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.process import ENVIRONMENT, ONLY_IDENTITY, START_SECONDS, ServerProcess

from xlaserve.client import AsyncClient

ROOT = Path(__file__).parents[1]
BUILD = r"\d+\.\d+\.\d+(\+[0-9a-f]{12})?"


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, str]:
    """An environment with every installed package except this one."""
    paths = [str(ROOT / name) for name in ("server", "generated")]
    for place in map(Path, dict.fromkeys(sys.path)):
        if not place.is_dir() or not any(place.glob("*.dist-info")):
            continue
        linked = tmp_path / f"site{len(paths)}"
        linked.mkdir()
        for each in place.iterdir():
            if not each.name.startswith(("xlaserve", "_xlaserve", "__editable__")):
                (linked / each.name).symlink_to(each)
        paths.append(str(linked))
    assert len(paths) > 2
    return os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}


async def _printed(environment: dict[str, str], *arguments: str) -> str:
    # Without `site`, which would add this interpreter's packages.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(START_SECONDS):
        out, _ = await process.communicate()
    assert 0 == process.returncode
    return out.decode().strip()


async def test_it_says_its_version(tree: dict[str, str]) -> None:
    looked = "from importlib.metadata import distributions as d; print([one.name for one in d()])"

    installed = await _printed(tree, "-c", looked)

    assert "'xlaserve'" not in installed
    assert "'jax'" in installed
    assert re.search(BUILD, await _printed(tree, "-m", "xlaserve", "--version"))


async def test_it_serves(tree: dict[str, str], example_models: Path) -> None:
    places = ("--grpc-endpoint", "port:0", "--http-endpoint", "port:0", "--device", "cpu")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-m", "xlaserve", "serve", str(example_models)),
        *(*places, *ONLY_IDENTITY),
        env=tree,
        stderr=asyncio.subprocess.PIPE,
    )
    server = ServerProcess(process, [])
    try:
        async with asyncio.timeout(START_SECONDS):
            await server.until("started")
        async with AsyncClient(server.url) as client:
            answer = await client.infer("identity", {"x": np.ones((1, 16), np.float32)})
        ended = await server.stop()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()

    assert 0 == ended
    assert 1 == server.event("started")["ready"]
    assert re.fullmatch(BUILD, server.event("listening")["version"])
    assert (1, 16) == answer["y"].shape
