"""A server that follows a repository, while its disk does what disks do."""

import shutil
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from support.process import ServerProcess, served

from xlaserve.dialing.interface import CallFailed
from xlaserve.dialing.over_grpc import Client
from xlaserve.tensors import DATATYPES, TensorSpec


async def metric(server: ServerProcess, name: str) -> float:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.http}/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"{name} ")))


async def answers(server: ServerProcess) -> bool:
    sent = np.ones((1, 16), np.float32)
    spec = TensorSpec("x", DATATYPES["FP32"], (1, 16))
    try:
        async with Client(server.url, timeout=30) as client:
            result = await client.infer("identity", "", [(spec, sent)])
    except CallFailed:
        return False
    return bool((next(iter(result.outputs.values())) == sent).all())


@pytest.mark.slow
async def test_odd_entries_and_a_volume_that_goes_and_comes_back(
    example_models: Path, tmp_path: Path
) -> None:
    """Neither ends the server nor takes a model away, be it there at the start or later."""
    root = tmp_path / "models"
    shutil.copytree(example_models / "identity", root / "identity")
    (root / "loop").symlink_to("loop")
    flags = ("--model-control-mode", "poll", "--poll-interval-seconds", "0.05")
    async with served(root, *flags) as server:
        skipped = server.event("repository entry skipped")

        assert ("loop", "it cannot be read: Too many levels of symbolic links") == (
            skipped["entry"],
            skipped["reason"],
        )

        for number in range(30):
            (root / f"loop-{number}").symlink_to(f"loop-{number}")
        await server.until("more repository entries skipped")

        assert 31 == await metric(server, "xlaserve_repository_skipped_entries")
        assert 1 == await metric(server, "xlaserve_repository_readable")

        root.rename(tmp_path / "elsewhere")
        root.mkdir()
        await server.until("repository unreadable, its models stay loaded")

        assert await answers(server)
        assert 0 == await metric(server, "xlaserve_repository_readable")

        root.rmdir()
        (tmp_path / "elsewhere").rename(root)
        await server.until("repository readable again")
        shutil.rmtree(root / "identity")
        await server.until("model unloaded")

        assert not await answers(server)
        assert 0 == await server.stop()
