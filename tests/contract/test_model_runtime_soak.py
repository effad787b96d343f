"""A runtime under load, and its process: acceptance case 25."""

import asyncio
import os
import resource
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from support import mesh
from support.process import ServerProcess, served
from support.shelf import Shelf, addition, spinning, sums
from support.soak import MODELS, ROOM, soak
from support.wire import connect, request_headers

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
"""A longer soak: `tox run -e nightly`; only the counts: `tools/modelmesh_soak.py`."""
LEAST_LOADS = 3 * ROOM
STOP_SECONDS = 10
"""CPU seconds rather than wall time, which says nothing on a busy machine."""
PROGRESS_SECONDS = 120


# --- Many models ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_many_models_through_little_room_leave_nothing(tmp_path: Path) -> None:
    """Case 25: no unloaded model is served, nothing leaks, and memory stays within the limit.

    Over TCP and a Unix socket at the same time, with loads and requests cancelled at any point.
    """
    report = await soak(SOAK_SECONDS, tmp_path, least_loads=LEAST_LOADS)
    print(report)

    assert [] == report.violations
    assert report.before == report.after
    assert max(report.most_bytes, report.most_booked_bytes) <= report.capacity_bytes
    # Make sure that models were loaded and evicted, and that memory was used up.
    assert report.counts["loads"] >= LEAST_LOADS
    assert report.most_bytes > report.capacity_bytes * (ROOM - 2) // ROOM
    assert min(report.counts[f"cancelled {what}"] for what in ("loads", "requests")) > 0
    assert MODELS > ROOM


# --- Process -------------------------------------------------------------------------------------


@asynccontextmanager
async def runtime_process(
    tmp_path: Path, endpoint: str, root: Path
) -> AsyncIterator[ServerProcess]:
    """Run the server like an operator, with a mesh."""
    (tmp_path / "repository").mkdir(exist_ok=True)
    flags = ("--modelmesh", "--model-root", str(root), "--grpc-endpoint", endpoint)
    more = ("--inline-execution-seconds", "0", "--load-threads", "2")
    async with served(tmp_path / "repository", *flags, *more) as server:
        yield server


@pytest.mark.slow
async def test_a_sigterm_ends_it_in_time(tmp_path: Path, endpoint: str, models: Shelf) -> None:
    """Case 25: within 10 seconds and with status 0, during loads and incomplete requests.

    Requests in progress complete; everything that could take longer is cancelled.
    """
    async with runtime_process(tmp_path, endpoint, models.root) as server:
        async with mesh.dial(server.url) as sidecar, connect(server.url) as wire:
            await sidecar.status()
            await sidecar.load("m", models.path("spin"))
            using = asyncio.ensure_future(mesh.code(sidecar.infer("m", spinning(1))))
            wire.open(request_headers("/inference.GRPCInferenceService/ModelInfer"))
            await wire.ping()
            loading = [
                asyncio.ensure_future(mesh.code(sidecar.load(f"slow-{i}", models.path("slow"))))
                for i in range(20)
            ]
            await until_loading(sidecar, "slow-0")
            spent = sum(psutil.Process(server.process.pid).cpu_times()[:2])
            others = ended_cpu_seconds()
            status = await server.stop(signal.SIGTERM)
            seconds = ended_cpu_seconds() - others - spent
            answers = await asyncio.gather(*loading)
    print(f"took {seconds:.1f} s of a core after SIGTERM")

    assert 0 == status
    assert seconds < STOP_SECONDS
    assert "OK" == await using
    assert {"OK", "UNAVAILABLE"} >= set(answers) >= {"UNAVAILABLE"}
    assert not Path(endpoint.removeprefix("unix:")).exists()


def ended_cpu_seconds() -> float:
    """Return the CPU time of exited child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def until_loading(sidecar: mesh.Mesh, model: str) -> None:
    """Wait until a load has begun: requests for the model then no longer get NOT_FOUND."""
    async with asyncio.timeout(PROGRESS_SECONDS):
        while await mesh.code(sidecar.infer(model, addition())) == "NOT_FOUND":
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_a_socket_left_behind_is_replaced(tmp_path: Path, models: Shelf) -> None:
    """Case 25: after kill -9, in a folder that outlives the container; any user may connect."""
    path = tmp_path / "grpc.sock"
    before = os.umask(0o077)
    try:
        async with runtime_process(tmp_path, f"unix:{path}", models.root) as first:
            await first.stop(signal.SIGKILL)
        left = path.stat()
        async with runtime_process(tmp_path, f"unix:{path}", models.root) as second:
            status = path.stat()
            async with mesh.dial(second.url) as sidecar:
                await sidecar.status()
                await sidecar.load("m", models.path("plus-1"))
                answer = await sidecar.infer("m", addition())
    finally:
        os.umask(before)

    assert stat.S_ISSOCK(left.st_mode)
    assert left.st_ino != status.st_ino or left.st_ctime_ns != status.st_ctime_ns
    assert 0o666 == stat.S_IMODE(status.st_mode)
    assert [1, 1] == sums(answer)


@pytest.mark.slow
async def test_a_mesh_finds_its_runtime_again(tmp_path: Path, models: Shelf) -> None:
    """Case 25: after kill -9 it gets NOT_FOUND, and loads again over the same channel."""
    path = tmp_path / "grpc.sock"
    async with runtime_process(tmp_path, f"unix:{path}", models.root) as first:
        async with mesh.dial(first.url) as sidecar:
            await sidecar.status()
            await sidecar.load("m", models.path("plus-1"))
            await first.stop(signal.SIGKILL)
            async with runtime_process(tmp_path, f"unix:{path}", models.root):
                gone = await patiently(sidecar)
                await sidecar.load("m", models.path("plus-1"))
                answer = await sidecar.infer("m", addition())

    assert "NOT_FOUND" == gone
    assert [1, 1] == sums(answer)


async def patiently(sidecar: mesh.Mesh) -> str:
    """Retry until the channel has connected to the new process."""
    async with asyncio.timeout(STOP_SECONDS):
        while (status := await mesh.code(sidecar.infer("m", addition()))) == "UNAVAILABLE":
            await asyncio.sleep(0.05)
    return status
