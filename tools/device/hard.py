"""Steps that provoke failures: exhausted memory, a lost device, foreign memory."""

import asyncio
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import numpy as np

from device.findings import Findings
from device.making import repository
from device.place import Place
from device.server import Server

_HOG = """
import os, subprocess, sys
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.99"
import jax, jax.numpy as jnp
asked = ["nvidia-smi", "--id=0", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
free = lambda: int(subprocess.run(asked, capture_output=True, text=True).stdout) << 20
held, size = [], 1 << 30
while size >= 1 << 26:
    if free() < size + (300 << 20):
        size >>= 1
        continue
    try:
        held.append(jnp.zeros(size, jnp.uint8).block_until_ready())
    except Exception:
        size >>= 1
print(free(), flush=True)
sys.stdin.readline()
"""
"""Program that occupies a GPU's memory until it is told to exit."""


def oom(place: Place, findings: Findings) -> None:
    """Exhaust the card's memory: loads must be refused and the server must survive and recover."""
    asyncio.run(_oom(place, findings))


async def _oom(place: Place, findings: Findings) -> None:
    folder = repository(place, "oom", "bert", "mlp")
    flags = ("--model-control-mode", "explicit", "--load-model", "mlp")
    async with Server(place, findings, folder, *flags) as server:
        hog = await asyncio.to_thread(_taken, place, findings)
        try:
            for _ in range(2):
                with findings.part("load without memory"):
                    await _refused(server, findings, is_expected=hog is not None)
            with findings.part("load without memory, REST"):
                await asyncio.to_thread(_refused_by_rest, server, findings)
            with findings.part("a small model meanwhile"):
                await asyncio.to_thread(server.bench, "mlp", 1, "4", 1.0)
        finally:
            if hog is not None:
                hog.communicate("\n")
        with findings.part("afterwards"):
            began = time.monotonic()
            await server.client.load("bert")
            seconds = round(time.monotonic() - began, 2)
            findings.add("afterwards", seconds=seconds, same=server.process.poll() is None)


def _taken(place: Place, findings: Findings) -> "subprocess.Popen[str] | None":
    if not place.is_gpu:
        return None
    hog = subprocess.Popen(
        [sys.executable, "-c", _HOG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cuda"},
    )  # fmt: skip
    assert hog.stdout is not None
    findings.add("memory is taken", free=hog.stdout.readline().strip())
    return hog


async def _refused(server: Server, findings: Findings, *, is_expected: bool) -> None:
    try:
        await server.client.load("bert")
    except Exception as error:
        status = getattr(error, "status", "")
        findings.add("load without memory", refused=True, status=status, said=str(error)[:300])
    else:
        findings.add("load without memory", refused=False if is_expected else None)
        await server.client.unload("bert")


def _refused_by_rest(server: Server, findings: Findings) -> None:
    url = f"http://{server.http}/v2/repository/models/bert/load"
    try:
        with urllib.request.urlopen(url, data=b"{}", timeout=300) as answer:
            findings.add("load without memory, REST", status=answer.status)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode()
        findings.add("load without memory, REST", status=error.code, said=said)


def lost(place: Place, findings: Findings) -> None:
    """Lose the device: a kernel traps, after which every call of this process fails.

    On a GPU the model is executed in this process in the same way as in the server; how the server
    handles such errors is covered by tests/core. On the CPU nothing is lost, and the model answers.
    """
    from device.here import Here
    from device.place import EXAMPLES
    from gpu_check.device import inputs_of
    from xlaserve.runtime.devices.device_failures import device_failure

    here = Here(place, findings)
    model = here.loaded(EXAMPLES / "mlp" / "1", sizes="1")
    inputs = inputs_of(model, 1)
    model.execute(inputs)
    if place.is_gpu:
        findings.add("trap", code=_trap())
    for attempt in ("first", "second"):
        try:
            model.execute(inputs)
        except Exception as error:
            said = device_failure(error)
            findings.add(f"{attempt} call", is_known=said is not None, same=said is not None,
                         said=said or str(error)[:300])  # fmt: skip
        else:
            findings.add(f"{attempt} call", same=not place.is_gpu, said="it answers")
    # Shutting down a lost device may hang.
    sys.stdout.flush()
    os._exit(0)


def _trap() -> int:
    """Execute a kernel that traps in this process's GPU context; the error is sticky."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    ptx = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry t() { trap; }\0"
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    cuda.cuCtxSetCurrent(context)
    _check(cuda.cuModuleLoadData(ctypes.byref(module), ptx))
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"t"))
    cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
    return int(cuda.cuCtxSynchronize())


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA error {code}")


def shm(place: Place, findings: Findings) -> None:
    """Use CUDA memory of this process for input and output (cuda_shared_memory extension)."""
    if not place.is_gpu:
        findings.add("cuda shared memory", skipped="no GPU")
        return
    with findings.part("cuda shared memory"):
        asyncio.run(_shm(place, findings))


class _Memory:
    """GPU memory that this process shares."""

    BYTES = 4096

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.address = ctypes.c_uint64()
        self.handle = (ctypes.c_ubyte * 64)()
        _check(self.cuda.cuInit(0))
        _check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        _check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(self.cuda.cuCtxSetCurrent(context))
        _check(self.cuda.cuMemAlloc_v2(ctypes.byref(self.address), ctypes.c_size_t(self.BYTES)))
        _check(self.cuda.cuIpcGetMemHandle(ctypes.byref(self.handle), self.address))

    def write(self, data: Any) -> None:
        """Copy an array to the beginning of the memory."""
        pointer = ctypes.c_void_p(data.ctypes.data)
        _check(self.cuda.cuMemcpyHtoD_v2(self.address, pointer, ctypes.c_size_t(data.nbytes)))
        _check(self.cuda.cuCtxSynchronize())

    def read(self, offset: int, data: Any) -> None:
        """Copy from an offset into an array."""
        pointer = ctypes.c_void_p(data.ctypes.data)
        place = ctypes.c_uint64(self.address.value + offset)
        _check(self.cuda.cuMemcpyDtoH_v2(pointer, place, ctypes.c_size_t(data.nbytes)))


async def _shm(place: Place, findings: Findings) -> None:
    from grpclib.client import Channel

    from xlaserve_proto import inference as pb

    data = np.arange(16, dtype=np.float32)
    memory = _Memory()
    memory.write(data)
    folder = repository(place, "shm", "identity")
    async with Server(place, findings, folder) as server:
        host, port = server.grpc.rsplit(":", 1)
        channel = Channel(host, int(port))
        with contextlib.closing(channel):
            stub = pb.GrpcInferenceServiceStub(channel, timeout=30)
            await stub.cuda_shared_memory_register(
                pb.CudaSharedMemoryRegisterRequest(
                    name="r", raw_handle=bytes(memory.handle), device_id=0, byte_size=memory.BYTES
                )
            )

            def at(offset: int) -> dict[str, Any]:
                return {
                    "shared_memory_region": pb.InferParameter(string_param="r"),
                    "shared_memory_byte_size": pb.InferParameter(int64_param=data.nbytes),
                    "shared_memory_offset": pb.InferParameter(int64_param=offset),
                }

            (spec,) = await server.client.inputs("identity")
            asked = pb.ModelInferRequest(
                model_name="identity",
                inputs=[
                    pb.ModelInferRequestInferInputTensor(
                        name=spec.name, datatype="FP32", shape=[1, 16], parameters=at(0)
                    )
                ],
                outputs=[
                    pb.ModelInferRequestInferRequestedOutputTensor(name="y", parameters=at(1024))
                ],
            )
            times = []
            for _ in range(50):
                began = time.perf_counter()
                await stub.model_infer(asked)
                times.append(time.perf_counter() - began)
            found = np.zeros(16, np.float32)
            memory.read(1024, found)
            await stub.cuda_shared_memory_unregister(pb.CudaSharedMemoryUnregisterRequest(name="r"))
            micro = round(1e6 * statistics.median(times), 1)
            same = bool((found == data).all())
            findings.add("cuda shared memory", same=same, microseconds=micro)
