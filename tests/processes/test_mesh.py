"""A mesh drives a server of several processes as one runtime."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support import identity_models, mesh, several
from support.mesh import Mesh
from support.process import served

MIB = 1 << 20


async def ready_status(sidecar: Mesh) -> Any:
    """Ask as a mesh does, again and again, until the runtime is ready."""
    while True:
        status = await sidecar.status()
        if status.status == mesh.message("mmesh.RuntimeStatusResponse").READY:
            return status
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_mesh_sees_one_runtime(tmp_path: Path) -> None:
    """Capacity and sizes are of all workers, and every worker has what it loads."""
    (tmp_path / "repository").mkdir()
    identity_models.write(tmp_path / "shelf", "echo", "FP32", [-1])
    flags = ("--modelmesh", "--model-root", str(tmp_path), "--capacity-bytes", str(1024 * MIB))
    many = ("--processes", "2", "--mesh-slack-bytes", str(24 * MIB))
    async with served(tmp_path / "repository", *flags, *many) as server:
        await server.until(several.READY)
        async with mesh.dial(server.url) as sidecar:
            status = await ready_status(sidecar)
            loaded = await sidecar.load("id-1", tmp_path / "shelf" / "echo")
            size = await sidecar.size("id-1")
            there = await several.connections_ready(server.http, "id-1", 8)
            await sidecar.unload("id-1")
            gone = await several.connections_ready(server.http, "id-1", 8)
            await sidecar.load("id-1", tmp_path / "shelf" / "echo")
            await ready_status(sidecar)
            purged = await several.connections_ready(server.http, "id-1", 8)

    assert 1000 * MIB == status.capacityInBytes
    assert loaded.sizeInBytes == size.sizeInBytes
    assert 0 == size.sizeInBytes % 2
    assert ({200}, {404}, {404}) == (there, gone, purged)
