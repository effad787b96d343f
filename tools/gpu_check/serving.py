"""A whole server on the device: latency while another model loads, and sizes reported to a mesh.

The client runs in the same process, so the figures include its share of the event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
from grpclib.client import Channel

from gpu_check.device import Device, Options
from gpu_check.findings import Finding, judged, measured, unknown
from xlaserve.app.server import Application
from xlaserve.dialing.address import parse_address
from xlaserve.dialing.dial import dial
from xlaserve.dialing.interface import ServerClient
from xlaserve.settings import Settings
from xlaserve.settings.choices import ModelControlMode
from xlaserve.tensors import Tensor, TensorSpec
from xlaserve_proto import mmesh

_TIMEOUT_SECONDS = 120.0
_WITHIN = 0.1
"""Fraction by which the predicted size may be below the measured growth."""


def check_serving(device: Device, options: Options) -> Iterator[Finding]:
    """Measure latency alone and while another model loads, then loads requested by a mesh."""
    yield asyncio.run(_tail(device, options))
    yield from asyncio.run(_mesh(device, options))


async def _tail(device: Device, options: Options) -> Finding:
    name, other = (options.directories[index].parent.name for index in (0, -1))
    async with _server(device, options) as (application, url):
        await application.control.load(name)
        async with dial(parse_address(url), timeout=_TIMEOUT_SECONDS) as client:
            inputs = [(spec, _ones(spec)) for spec in await client.inputs(name)]
            await client.infer(name, "", inputs)
            alone = await _p99_seconds(client, name, inputs, options.seconds)
            loading = asyncio.ensure_future(application.control.load(other))
            beside = await _p99_seconds(client, name, inputs, options.seconds, loading)
            await loading
    return measured(
        "tail beside a load", name,
        f"p99 {1e3 * alone:.2f} ms alone, {1e3 * beside:.2f} ms while '{other}' loads",
        alone_p99_seconds=alone, beside_p99_seconds=beside,
    )  # fmt: skip


async def _p99_seconds(
    client: ServerClient,
    name: str,
    inputs: Sequence[tuple[TensorSpec, Tensor]],
    seconds: float,
    until: "asyncio.Future[Any] | None" = None,
) -> float:
    """Return the 99th percentile of sequential requests until a load has ended."""
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 2 or time.perf_counter() - started < seconds or (until and not until.done()):
        begun = time.perf_counter()
        await client.infer(name, "", inputs)
        times.append(time.perf_counter() - begun)
    return quantiles(times, n=100)[-1]


async def _mesh(device: Device, options: Options) -> list[Finding]:
    found = []
    async with _server(device, options, modelmesh=True, id_injection="header") as (_, url):
        address = parse_address(url)
        with closing(Channel(address.host, address.port)) as channel:
            mesh = mmesh.ModelRuntimeStub(channel, timeout=_TIMEOUT_SECONDS)
            await mesh.runtime_status(mmesh.RuntimeStatusRequest())
            for directory in options.directories:
                found.append(await _size(device, mesh, directory))
    return found


async def _size(device: Device, mesh: mmesh.ModelRuntimeStub, directory: Path) -> Finding:
    name, used = directory.parent.name, device.bytes_in_use()
    asked = mmesh.LoadModelRequest(model_id=name, model_path=str(directory))
    size = (await mesh.load_model(asked)).size_in_bytes
    grown = device.bytes_in_use() - used
    await mesh.unload_model(mmesh.UnloadModelRequest(model_id=name))
    left = device.bytes_in_use() - used
    said = f"the mesh is told {size} bytes; the device grew by {grown}, {left} left after it"
    if not device.limit_bytes:
        return unknown("size for a mesh", name, said)
    return judged(
        "size for a mesh", name, grown <= size * (1 + _WITHIN) and left == 0, said,
        told_bytes=size, grown_bytes=grown, left_bytes=left,
    )  # fmt: skip


def _ones(spec: TensorSpec) -> Tensor:
    return np.ones([max(1, size) for size in spec.shape], spec.datatype.dtype)


@asynccontextmanager
async def _server(
    device: Device, options: Options, **settings: object
) -> AsyncIterator[tuple[Application, str]]:
    """Run a server without models; yield it and its gRPC address."""
    given = {
        "grpc_endpoint": "port:0",
        "http_endpoint": "none",
        "model_control_mode": ModelControlMode.EXPLICIT,
        "compilation_cache_directory": "none",
        "device": device.platform,
    } | settings
    if given.get("modelmesh"):
        given["model_control_mode"] = ModelControlMode.NONE
    repository = options.directories[0].parent.parent
    application = Application(Settings.read({}, repository=repository, **given))
    async with application.running() as addresses:
        await application.load()
        yield application, addresses.grpc
