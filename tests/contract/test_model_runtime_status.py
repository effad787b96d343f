"""The model runtime from its start to a purge: acceptance cases 1 to 4."""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from support import mesh
from support.http import ask
from support.process import ServerProcess, command, run
from support.runtime import Runtime, StartRuntime
from support.shelf import MIB, Shelf, addition, spinning, sums

from xlaserve.errors import InvalidSettings
from xlaserve.settings.choices import ModelControlMode

ANSWER_SECONDS = 30
"""Ten times the mesh's limit for reaching the endpoint after exec, because shared machines are
slow; the time is printed.
"""
TRIES = 3

WAITING_JAX = """
import sys
from pathlib import Path

folder = Path(__file__).parent.parent
(folder / "importing").touch()
(folder / "go").read_bytes()  # a pipe: returns when the test has written
sys.path.remove(str(folder))
del sys.modules["jax"]
import jax
"""
"""A fake jax package that delays the import until the test releases it."""

INT31, UNITS = 2**31 - 1, (2**31 - 1) * 8192
"""The mesh's 32-bit maximum, and the largest size it can count, in units of 8 KiB."""


# --- 1: Start ------------------------------------------------------------------------------------


@asynccontextmanager
async def starting(*flags: str, path: Path) -> AsyncIterator[ServerProcess]:
    """Run a server process with an additional folder at the front of its import path."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]),
        "XLASERVE_LOG_LEVEL": "info",
    }
    arguments = command("serve", *flags, "--modelmesh", "--http-endpoint", "none")
    child = await asyncio.create_subprocess_exec(
        *arguments, "--device", "cpu", stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        yield ServerProcess(child, [])
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


def own_endpoint(kind: str, folder: Path) -> tuple[str, str]:
    """Return a free endpoint, and the address for clients."""
    if kind == "unix":
        return f"unix:{folder}/grpc.sock", f"unix:{folder}/grpc.sock"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"port:{port}", f"127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["port", "unix"])
async def test_the_endpoint_answers_within_seconds_of_exec(tmp_path: Path, kind: str) -> None:
    """Case 1: the best of a few attempts is printed; STARTING has its own test."""
    times: list[float] = []
    states: set[int] = set()
    for _ in range(TRIES):
        endpoint, url = own_endpoint(kind, tmp_path)
        started = time.monotonic()
        async with starting(str(tmp_path), "--grpc-endpoint", endpoint, path=tmp_path):
            async with mesh.dial(url) as sidecar:
                answer = await until_reached(sidecar)
                times.append(time.monotonic() - started)
                states.add(answer.status - answer.STARTING)
    print(f"{kind}: the endpoint answered after {min(times):.2f} s")

    # STARTING, or READY on a fast machine.
    assert states <= {0, 1}
    assert min(times) < ANSWER_SECONDS


@pytest.mark.parametrize("kind", ["port", pytest.param("unix", marks=pytest.mark.slow)])
async def test_the_endpoint_answers_before_jax_is_imported(tmp_path: Path, kind: str) -> None:
    """Case 1: its status is STARTING until it is READY."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").write_text(WAITING_JAX)
    os.mkfifo(tmp_path / "go")
    (tmp_path / "repository").mkdir()
    endpoint, url = own_endpoint(kind, tmp_path)

    flags = (str(tmp_path / "repository"), "--grpc-endpoint", endpoint)
    async with starting(*flags, path=tmp_path) as server:
        async with mesh.dial(url) as sidecar:
            first = await until_reached(sidecar)
            while not (tmp_path / "importing").exists():
                await asyncio.sleep(0.01)
            second = await sidecar.status()
            await asyncio.to_thread((tmp_path / "go").write_bytes, b"go")
            answers = [first, second]
            while answers[-1].status != first.READY:
                answers.append(await sidecar.status())
            status = await server.stop()

    assert [first.STARTING] * (len(answers) - 1) == [answer.status for answer in answers[:-1]]
    assert 0 == status


async def until_reached(sidecar: mesh.Mesh) -> Any:
    """Return the first answer, retrying until the process listens."""
    while True:
        try:
            return await sidecar.status()
        except grpc.aio.AioRpcError as error:
            assert grpc.StatusCode.UNAVAILABLE is error.code()
            await asyncio.sleep(0.01)


async def test_management_and_inference_may_have_endpoints_of_their_own(
    start: StartRuntime, models: Shelf, tmp_path: Path
) -> None:
    """Case 1: the second endpoint belongs to the same server."""
    settings = {"grpc_data_endpoint": f"unix:{tmp_path}/data.sock"}
    async with start(**settings) as runtime:
        async with mesh.dial(runtime.url, settings["grpc_data_endpoint"]) as sidecar:
            sidecar.paths = runtime.mesh.paths
            await sidecar.load("m", models.path("plus-1"))
            answer = await sidecar.infer("m", addition(1, 2))

    assert [2, 3] == sums(answer)


# --- 2: Contents of READY ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"default_model_size_bytes": 1 << 20, "capacity_bytes": 10 << 20},
        {"load_threads": 3, "model_loading_timeout_ms": 100, "default_model_size_bytes": 1},
        {"capacity_bytes": UNITS, "model_loading_timeout_ms": INT31},
        {"limit_model_concurrency": True},
    ],
)
async def test_ready_is_within_the_limits_of_a_mesh(
    start: StartRuntime, settings: dict[str, Any]
) -> None:
    """Case 2: a mesh checks four of the values and exits if one is invalid."""
    async with start(**settings) as runtime:
        ready = await runtime.mesh.status()

    assert ready.READY == ready.status
    assert 1 <= ready.maxLoadingConcurrency <= INT31
    assert 1 <= ready.defaultModelSizeInBytes <= UNITS
    assert 100 <= ready.modelLoadingTimeoutMs <= INT31
    default = ready.defaultModelSizeInBytes
    assert max(2 * default, min(512 << 20, 10 * default)) <= ready.capacityInBytes <= UNITS
    assert ready.runtimeVersion
    assert settings.get("limit_model_concurrency", False) == ready.limitModelConcurrency


async def test_a_mesh_is_told_the_settings(start: StartRuntime) -> None:
    """Case 2: by value, and identical every time."""
    settings = {
        "capacity_bytes": 3 << 30,
        "mesh_slack_bytes": 123_456_789,
        "default_model_size_bytes": 54_321,
        "model_loading_timeout_ms": 67_890,
        "load_threads": 5,
    }
    async with start(**settings) as runtime:
        answers = [await runtime.mesh.status() for _ in range(3)]

    assert [(3 << 30) - 123_456_789] * 3 == [ready.capacityInBytes for ready in answers]
    assert {(54_321, 67_890, 5)} == {
        (ready.defaultModelSizeInBytes, ready.modelLoadingTimeoutMs, ready.maxLoadingConcurrency)
        for ready in answers
    }


async def test_the_capacity_is_what_the_pod_asked_for_less_overhead_and_slack(
    start: StartRuntime,
) -> None:
    """Case 2: on the CPU, the host's devices share the container's memory."""
    overhead = 100 << 20
    settings = {"container_memory_bytes": 3 << 30, "memory_overhead_bytes": overhead}
    async with start(**settings, default_model_size_bytes=MIB) as runtime:
        ready = await runtime.mesh.status()
        devices = len(runtime.application.capacity.totals)

    memory = ((3 << 30) - overhead) // devices
    assert memory - memory // 20 == ready.capacityInBytes


async def test_the_slack_grows_with_the_largest_model_that_was_seen(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 2: so that several of them can load before the mesh knows their sizes."""
    memory = 2 << 30
    async with start(capacity_bytes=memory, load_threads=2) as runtime:
        before = (await runtime.mesh.status()).capacityInBytes
        await runtime.mesh.load("m", models.path("large"))
        needed = runtime.application.registry.needed_bytes("m")
        after = (await runtime.mesh.status()).capacityInBytes

    assert (memory - memory // 20, memory - 2 * needed) == (before, after)


REFUSED: Mapping[str, dict[str, Any]] = {
    "capacity_bytes": {"capacity_bytes": 1 << 20},
    "memory_overhead_bytes": {"container_memory_bytes": 1 << 20},
    "default_model_size_bytes": {"default_model_size_bytes": UNITS + 1, "capacity_bytes": 0},
    "model_loading_timeout_ms": {"model_loading_timeout_ms": INT31 + 1},
    "load_threads": {"load_threads": INT31 + 1},
    "max_concurrency": {"max_concurrency": INT31 + 1},
    "model_control_mode": {"model_control_mode": ModelControlMode.POLL},
    "mesh_slack_bytes": {"mesh_slack_bytes": 2 << 30, "capacity_bytes": 2 << 30},
    "load_model": {"model_control_mode": ModelControlMode.EXPLICIT, "load_model": ("simple",)},
}


@pytest.mark.parametrize("setting", REFUSED)
async def test_settings_that_a_mesh_would_die_of_are_refused_at_start(
    start: StartRuntime, setting: str
) -> None:
    """Case 2: with an error that names the setting."""
    with pytest.raises(InvalidSettings, match=setting):
        async with start(**REFUSED[setting]):
            pass


@pytest.mark.slow
async def test_a_refused_setting_ends_the_process_with_one_line(tmp_path: Path) -> None:
    """Case 2: the operator reads it in the container's log."""
    flags = ("--modelmesh", "--grpc-endpoint", "port:0", "--http-endpoint", "none")
    status, _, text = await run(
        *command("serve", str(tmp_path), *flags, "--device", "cpu", "--capacity-bytes", "1000")
    )

    assert 1 == status
    assert text.splitlines()[-1].startswith("error: setting capacity_bytes: expected at least")


# --- 3: Methods ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("injection", "path"), [("path", [1]), ("header", [])])
async def test_exactly_the_methods_about_one_model_are_let_through(
    start: StartRuntime, injection: str, path: list[int]
) -> None:
    """Case 3: fully qualified, with the id's field path, and no management methods."""
    async with start(id_injection=injection) as runtime:
        ready = await runtime.mesh.status()

    assert {
        f"inference.GRPCInferenceService/{method}": path
        for method in ("ModelInfer", "ModelMetadata", "ModelReady")
    } == runtime.mesh.paths
    assert not ready.allowAnyMethod


async def test_http_beside_a_mesh_shows_metrics_and_manages_nothing(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 3: the manifests open HTTP to the cluster."""
    async with start(http_endpoint="port:0", repository=models.root) as runtime:
        await runtime.mesh.load("m", models.path("plus-1"))
        http = runtime.http
        shown = await ask(http, "GET", "/metrics")
        body = json.dumps({"model_name": "n", "url": str(models.path("plus-2"))}).encode()
        refused = [
            await ask(http, "POST", "/v2/repository/models/plus-2/load"),
            await ask(http, "POST", "/v2/repository/models/m/unload"),
            await ask(http, "POST", "/models", body=body),
            await ask(http, "DELETE", "/models/m"),
        ]
        rows = await runtime.application.control.catalog.index()

    assert b'xlaserve_model_ready{model="m",version="1"} 1' in shown.body
    assert {503} == {answer.status for answer in refused}
    assert ["m"] == [row.name for row in rows]


# --- 4: A restarted mesh -------------------------------------------------------------------------


@pytest.mark.usefixtures("compilations")
async def test_a_mesh_that_starts_again_finds_nothing_loaded(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 4: loaded, loading and used models are gone when it gets READY."""
    async with start(inline_execution_seconds=0) as runtime:
        before = runtime.held()
        await asyncio.gather(
            runtime.mesh.load("loaded", models.path("plus-1")),
            runtime.mesh.load("in use", models.path("spin")),
        )
        loading = asyncio.ensure_future(mesh.code(runtime.mesh.load("slow", models.path("slow"))))
        await runtime.until_compiling("slow")
        using = asyncio.ensure_future(mesh.code(runtime.mesh.infer("in use", spinning(0.5))))
        await runtime.until_in_use()

        ready = await runtime.mesh.status()
        after, rows = runtime.held(), await runtime.application.control.catalog.index()
        answers = [
            await mesh.code(runtime.mesh.infer(model, addition()))
            for model in ("loaded", "in use", "slow", "never heard of")
        ]

        assert ready.READY == ready.status
        assert before == after
        assert [] == rows
        assert ["NOT_FOUND"] * 4 == answers
        assert "CANCELLED" == await loading
        assert await using in ("OK", "UNAVAILABLE")
        assert [2, 2] == sums(await reloaded(runtime, models))


async def reloaded(runtime: Runtime, models: Shelf) -> Any:
    """Load a purged model, and use it immediately."""
    await runtime.mesh.load("loaded", models.path("plus-2"))
    return await runtime.mesh.infer("loaded", addition())


@pytest.mark.usefixtures("compilations")
async def test_the_first_ready_means_empty_too(start: StartRuntime, models: Shelf) -> None:
    """Case 4: a runtime that restarted under a live mesh has models before the first status
    call.
    """
    async with start(asked=False) as runtime:
        before = runtime.held()
        await runtime.mesh.load("loaded", models.path("plus-1"))
        loading = asyncio.ensure_future(mesh.code(runtime.mesh.load("slow", models.path("slow"))))
        await runtime.until_compiling("slow")
        ready = await runtime.mesh.status()
        after, rows = runtime.held(), await runtime.application.control.catalog.index()

        assert ready.READY == ready.status
        assert (before, []) == (after, rows)
        assert "CANCELLED" == await loading
        assert [2, 2] == sums(await reloaded(runtime, models))


async def test_a_load_that_comes_during_a_purge_is_not_there_behind_it(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 4: only a mesh that is exiting can send one; the new mesh does not know about it."""
    async with start(inline_execution_seconds=0) as runtime, mesh.dial(runtime.url) as dying:
        await runtime.mesh.load("in use", models.path("spin"))
        using = asyncio.ensure_future(mesh.code(runtime.mesh.infer("in use", spinning(1))))
        await runtime.until_in_use()
        asking = asyncio.ensure_future(runtime.mesh.status())
        await runtime.until_unloading("in use")
        late = await mesh.code(dying.load("late", models.path("plus-1")))
        ready = await asking
        rows = await runtime.application.control.catalog.index()

        assert ("CANCELLED", []) == (late, rows)
        assert ready.READY == ready.status
        assert await using in ("OK", "UNAVAILABLE")
        assert [2, 2] == sums(await reloaded(runtime, models))


async def test_meshes_that_ask_at_once_all_find_nothing_loaded(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 4: each answer is true when sent, and the runtime accepts loads after the last."""
    async with start() as runtime:
        calls = [runtime.mesh.load(f"m{i}", models.path("plus-1")) for i in range(4)]
        loading = [asyncio.ensure_future(mesh.code(call)) for call in calls]
        index = runtime.application.control.catalog.index
        while len(await index()) < len(calls):  # later loads would not be purged
            await asyncio.sleep(0)
        answers = await asyncio.gather(*(runtime.mesh.status() for _ in range(5)))
        rows = await index()

        assert {answers[0].READY} == {answer.status for answer in answers}
        assert [] == rows
        assert {"OK", "CANCELLED"} >= set(await asyncio.gather(*loading))
        assert [2, 2] == sums(await reloaded(runtime, models))


async def test_ready_waits_for_requests_that_outlive_the_drain(
    start: StartRuntime, models: Shelf
) -> None:
    """Case 4: memory is released before READY, however long that takes."""
    async with start(inline_execution_seconds=0, drain_seconds=0.1) as runtime:
        before = runtime.held()
        await runtime.mesh.load("in use", models.path("spin"))
        using = asyncio.ensure_future(mesh.code(runtime.mesh.infer("in use", spinning(1))))
        await runtime.until_in_use()

        await runtime.mesh.status()
        after = runtime.held()

        assert before == after
        assert "OK" == await using


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.EXPLICIT])
async def test_the_repository_is_not_the_meshs_business(
    start: StartRuntime, models: Shelf, mode: ModelControlMode
) -> None:
    """Case 4: directories that the puller left are neither loaded nor listed."""
    async with start(repository=models.root, model_control_mode=mode) as runtime:
        rows = await runtime.application.control.catalog.index()
        answer = await mesh.outcome(runtime.mesh.call("ModelReady", "plus-1", b""))

    assert [] == rows
    assert mesh.lost(answer)
