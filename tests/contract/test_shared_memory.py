"""The system shared memory extension, with the stock clients over both transports."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import gc
import os
import socket
import subprocess
import sys
import threading
import weakref
from base64 import b64encode
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import numpy as np
import pytest
import tritonclient.utils as triton
import tritonclient.utils.shared_memory as shm
from support import identity_models, python_models
from support.conditions import MOST_SECONDS, until
from support.doubling import export_double
from support.fake_cuda import FakeCuda
from support.gated import Gate, gate
from support.http import ask
from support.server import RunningServer, Serve
from support.stock import KINDS, Stock, stock_client
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.runtime.devices.cuda_driver import CudaDriver, open_driver
from xlaserve.serving.call import NOBODY
from xlaserve.serving.inputs.cuda_regions import CudaRegions
from xlaserve.serving.inputs.shared_memory import Regions

DATA = np.arange(4, dtype=np.float32).reshape(1, 4)
SIZE = DATA.nbytes
TEXTS = np.array([b"one", b"", "zw\xf6lf".encode()], np.object_)
BAD_KEYS = (
    "../../etc/passwd",
    "/../../etc/passwd",
    "/a/b",
    "..",
    ".",
    "",
    "/",
    "//a",
    "a\0b",
    "x" * 300,
    "sem.a",
    "not there",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "echo", "FP32", (-1, 4))
    identity_models.write(root, "bools", "BOOL")
    identity_models.write(root, "texts", "BYTES")
    export_double(root)
    return root


@pytest.fixture
async def server(serve: Serve, models: Path) -> AsyncIterator[RunningServer]:
    """A server with all models but the JAX model, which takes half a second to load."""
    models_alone = ("echo", "bools", "texts")
    async with serve(models, load_model=models_alone, http_endpoint="port:0") as running:
        yield running


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, server: RunningServer) -> AsyncIterator[Stock]:
    async with stock_client(request.param, server) as connected:
        yield connected


@pytest.fixture
async def quick(server: RunningServer) -> AsyncIterator[Stock]:
    """A single client, for tests that do not depend on the transport."""
    async with stock_client("grpc.aio", server) as connected:
        yield connected


class Memory:
    """A test's shared memory file."""

    def __init__(self, size: int) -> None:
        self.key = f"/xlaserve-{uuid4().hex}"
        self.path = Path("/dev/shm", self.key[1:])
        self.handle = shm.create_shared_memory_region("test", self.key, size)

    def put(self, *arrays: np.ndarray[Any, Any], offset: int = 0) -> None:
        """Write arrays one after the other."""
        shm.set_shared_memory_region(self.handle, arrays, offset)

    def get(self, dtype: Any, shape: Any, offset: int = 0) -> Any:
        """Return an array as a client would read it."""
        return shm.get_contents_as_numpy(self.handle, dtype, shape, offset).copy()


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(4096)
    yield made
    shm.destroy_shared_memory_region(made.handle)


async def register(client: Stock, memory: Memory, name: str = "r", size: int = 4096) -> None:
    await client.ask("register_system_shared_memory", name, memory.key, size)


def placed(client: Stock, size: int = SIZE, offset: int = 0, region: str = "r") -> Any:
    tensor = client.input("x", list(DATA.shape), "FP32")
    tensor.set_shared_memory(region, size, offset)
    return tensor


def wanted(client: Stock, size: int, offset: int = 0, region: str = "r") -> Any:
    output = client.output("y")
    output.set_shared_memory(region, size, offset)
    return output


async def test_a_region_is_registered_listed_and_unregistered(
    client: Stock, memory: Memory
) -> None:
    await register(client, memory, "a", 64)
    await client.ask("register_system_shared_memory", "b", memory.key, 64, offset=128)
    regions = await listed(client)
    one = await listed(client, "b")
    twice = await client.fault("register_system_shared_memory", "a", memory.key, 64)
    await client.ask("unregister_system_shared_memory", "a")
    await client.ask("unregister_system_shared_memory", "a")
    left = await listed(client)
    unknown = await client.fault("get_system_shared_memory_status", "a")
    await client.ask("unregister_system_shared_memory")

    assert {("a", memory.key, 0, 64), ("b", memory.key, 128, 64)} == regions
    assert {("b", memory.key, 128, 64)} == one == left
    assert "shared memory region 'a' already in manager" in twice
    assert "Unable to find system shared memory region: 'a', register it" == unknown
    assert set() == await listed(client)


async def listed(client: Stock, name: str = "") -> set[tuple[str, str, int, int]]:
    status = await client.ask("get_system_shared_memory_status", name)
    rows = status.regions.values() if "grpc" in client.kind else status
    if "grpc" in client.kind:
        return {(row.name, row.key, row.offset, row.byte_size) for row in rows}
    return {(row["name"], row["key"], row["offset"], row["byte_size"]) for row in rows}


@pytest.mark.parametrize("in_place", [False, True])
async def test_inputs_and_outputs_are_in_shared_memory(
    serve: Serve, models: Path, in_place: bool
) -> None:
    """At offsets within the region, and of the region within its file."""
    settings = {"shared_memory_in_place": in_place, "http_endpoint": "port:0"}
    async with serve(models, load_model=("echo",), **settings) as server:
        for kind in KINDS:
            await check_places(server, kind)


async def check_places(server: RunningServer, kind: str) -> None:
    memory = Memory(4096)
    memory.put(DATA, offset=192)
    async with stock_client(kind, server) as client:
        await client.ask("register_system_shared_memory", "r", memory.key, 1024, offset=128)
        outputs = [wanted(client, 64, 256)]
        answer = await client.ask("infer", "echo", [placed(client, SIZE, 64)], outputs=outputs)
        await client.ask("unregister_system_shared_memory", "r")

    # As Triton documents it. Its C++ client takes an output with parameters for a binary one, and
    # other clients match raw contents to outputs by order.
    output = answer.get_output("y")
    if "grpc" in kind:
        assert [b""] == list(answer.get_response().raw_output_contents)
        assert ("y", "FP32", [1, 4], 0) == (
            output.name,
            output.datatype,
            list(output.shape),
            len(output.parameters),
        )
    else:
        assert {"name": "y", "datatype": "FP32", "shape": [1, 4]} == output
    assert DATA.tolist() == memory.get(np.float32, DATA.shape, 384).tolist()
    shm.destroy_shared_memory_region(memory.handle)


async def test_they_are_mixed_with_tensors_in_the_message(client: Stock, memory: Memory) -> None:
    memory.put(DATA)
    await register(client, memory)
    from_memory = await client.ask("infer", "echo", [placed(client)])
    sent = client.input("x", list(DATA.shape), "FP32")
    sent.set_data_from_numpy(DATA + 1)
    into = await client.ask("infer", "echo", [sent], outputs=[wanted(client, SIZE, 512)])

    assert DATA.tolist() == from_memory.as_numpy("y").tolist()
    assert into.get_output("y") is not None
    assert (DATA + 1).tolist() == memory.get(np.float32, DATA.shape, 512).tolist()


async def test_texts_are_in_shared_memory(client: Stock, memory: Memory) -> None:
    packed = triton.serialize_byte_tensor(TEXTS)
    memory.put(packed)
    await register(client, memory)
    tensor = client.input("x", [3], "BYTES")
    tensor.set_shared_memory("r", len(packed.item()))
    await client.ask("infer", "texts", [tensor], outputs=[wanted(client, 256, 1024)])

    assert TEXTS.tolist() == memory.get(np.object_, [3], 1024).tolist()


async def test_a_model_of_jax_reads_shared_memory(
    serve: Serve, models: Path, memory: Memory
) -> None:
    """Requests in a batch have separate locations; one that is too small fails alone."""
    rows = np.array([[1, 2], [3, 4]], np.float32)
    memory.put(rows)
    async with (
        serve(models, load_model=("double",)) as server,
        stock_client("grpc.aio", server) as client,
    ):
        await register(client, memory)
        server.gather("double", 3)

        async def infer(row: int, size: int) -> Any:
            tensor = client.input("x", [1, 2], "FP32")
            tensor.set_shared_memory("r", 8, 8 * row)
            outputs = [wanted(client, size, 512 + 8 * row)]
            return await client.ask("infer", "double", [tensor], outputs=outputs)

        ends = await asyncio.gather(infer(0, 8), infer(1, 4), infer(1, 8), return_exceptions=True)

    assert "at least 8 bytes to hold the results, got 4" in str(ends[1])
    assert not any(isinstance(ends[index], BaseException) for index in (0, 2))
    assert (2 * rows).tolist() == memory.get(np.float32, [2, 2], 512).tolist()


async def test_what_is_not_within_the_region_is_refused(client: Stock, memory: Memory) -> None:
    """The error names the model, and the tensor or region."""
    await register(client, memory, size=64)
    faults = [
        ((SIZE, 0, "nobody"), "shared memory region 'nobody': expected a registered region"),
        ((SIZE, 56, "r"), "within its 64 bytes, got 16 bytes at 56"),
        ((SIZE, 2**62, "r"), "within its 64 bytes"),
        ((SIZE + 4, 0, "r"), "input 'x': expected a shared_memory_byte_size of 16 bytes"),
    ]
    for (size, offset, region), text in faults:
        assert text in await client.fault("infer", "echo", [placed(client, size, offset, region)])
    memory.put(DATA)
    small = await client.fault(
        "infer", "echo", [placed(client)], outputs=[wanted(client, SIZE - 1, 32)]
    )
    outside = await client.fault(
        "infer", "echo", [placed(client)], outputs=[wanted(client, SIZE, 60)]
    )

    expected = "a shared_memory_byte_size of at least 16 bytes to hold the results, got 15 bytes"
    assert f"model 'echo', output 'y': expected {expected}" == small
    assert "within its 64 bytes" in outside


async def test_offsets_of_64_bits_do_not_wrap_around(quick: Stock, memory: Memory) -> None:
    for offset, size in ((2**63, 64), (2**64 - 1, 1), (0, 2**64 - 1), (2**63 - 1, 2**63 - 1)):
        text = await quick.fault("register_system_shared_memory", "r", memory.key, size, offset)
        assert "shared memory region 'r': expected" in text
    assert set() == await listed(quick)


async def test_a_key_that_names_no_shared_memory_is_refused(quick: Stock) -> None:
    for key in BAD_KEYS:
        text = await quick.fault("register_system_shared_memory", "r", key, 16)

        assert text.startswith("shared memory region 'r': expected ")
    assert set() == await listed(quick)


async def test_only_plain_files_of_its_own_user_are_opened(
    quick: Stock, memory: Memory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    link, pipe = (Path("/dev/shm", f"xlaserve-{uuid4().hex}") for _ in range(2))
    link.symlink_to(secret)
    os.mkfifo(pipe)
    try:
        for path in (link, pipe):
            text = await quick.fault("register_system_shared_memory", "r", path.name, 16)
            assert "expected the key of shared memory" in text
    finally:
        link.unlink()
        pipe.unlink()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)

    text = await quick.fault("register_system_shared_memory", "r", memory.key, 16)
    assert "shared memory owned by the server's user" in text


async def test_more_than_there_is_cannot_be_registered(quick: Stock, memory: Memory) -> None:
    text = await quick.fault("register_system_shared_memory", "r", memory.key, 4097)

    assert f"with 4097 bytes at 0, got '{memory.key}' of 4096 bytes" in text


async def test_regions_are_limited_and_leave_nothing(
    serve: Serve, models: Path, memory: Memory
) -> None:
    """Every opened file is closed again, however many are registered."""
    async with (
        serve(models, max_shared_memory_regions=8) as server,
        stock_client("grpc.aio", server) as client,
    ):
        before = open_files()
        refused = ""
        for index in range(2000):
            try:
                await register(client, memory, f"{index}", 64)
            except triton.InferenceServerException as error:
                refused = str(error.message())
        many = open_files()
        await client.ask("unregister_system_shared_memory")
        for _ in range(50):
            await register(client, memory)
            await client.ask("unregister_system_shared_memory", "r")
        after = open_files()
    gc.collect()

    assert "no more than 8 regions" in refused
    assert before + 8 == many
    assert before == after
    assert open_files() <= before


def open_files() -> int:
    """Return the number of shared memory files that tests have opened in this process."""
    gc.collect()
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            targets.append(str(link.readlink()))
    return sum(target.startswith("/dev/shm/xlaserve-") for target in targets)


async def test_bytes_of_regions_are_limited(serve: Serve, models: Path, memory: Memory) -> None:
    async with (
        serve(models, max_shared_memory_bytes=5000) as server,
        stock_client("grpc.aio", server) as client,
    ):
        await register(client, memory, "a")
        text = await client.fault("register_system_shared_memory", "b", memory.key, 4096)

    assert "no more than 5000 bytes of shared memory may be registered" in text


WAITING = """
from support.gated import pass_gate

class Waiting(PythonModel):
    inputs = {{"x": ("FP32", [1, 4])}}
    outputs = {{"y": ("FP32", [1, 4])}}

    def infer(self, inputs):
        pass_gate({!r}, inputs["x"])
        return {{"y": 2 * inputs["x"]}}
"""


@pytest.fixture
async def waiting(serve: Serve, tmp_path: Path) -> AsyncIterator[tuple[Gate, RunningServer]]:
    """A model with two copies whose executions the test releases."""
    code = WAITING.format(str(tmp_path / "gate"))
    python_models.write(tmp_path / "models", "waiting", code, "instance_group { count: 2 }")
    identity_models.write(tmp_path / "models", "echo", "FP32", (-1, 4))
    settings = {"http_endpoint": "port:0", "max_shared_memory_regions": 2}
    async with (
        gate(tmp_path / "gate") as held,
        serve(
            tmp_path / "models", load_model=("*",), allow_python_models=True, **settings
        ) as server,
    ):
        yield held, server


@pytest.mark.parametrize("beside", [True, False], ids=["both", "input"])
async def test_an_unregistered_region_is_listed_while_a_request_uses_it(
    waiting: tuple[Gate, RunningServer], memory: Memory, beside: bool
) -> None:
    """As in Triton: its requests read and write it, further ones may name it, then it is gone."""
    held, server = waiting
    memory.put(DATA)
    async with stock_client("http.aio", server) as other:
        for kind in KINDS:
            async with stock_client(kind, server) as client:
                await register(other, memory)

                def infer(client: Stock = client) -> Coroutine[Any, Any, Any]:
                    outputs = [wanted(client, SIZE, 64)] if beside else None
                    return client.ask("infer", "waiting", [placed(client)], outputs=outputs)

                held.free(3)
                for _ in range(3):
                    await infer()
                asked = [asyncio.create_task(infer())]
                await until(lambda: held.held == 1)
                await other.ask("unregister_system_shared_memory")
                used = await listed(other, "r")
                if kind != "http":  # its only thread is busy
                    for _ in range(3):
                        await client.ask("infer", "echo", [placed(client)])
                    asked.append(asyncio.create_task(infer()))
                    await until(lambda: held.held == 2)
                    held.free()
                    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)

                    assert used == await listed(other)
                held.free()
                await asyncio.gather(*asked)
                async with asyncio.timeout(MOST_SECONDS):
                    while await listed(other):
                        pass

                assert {("r", memory.key, 0, 4096)} == used
                assert "expected a registered region" in await client.fault(
                    "infer", "waiting", [placed(client)]
                )
        if beside:
            assert (2 * DATA).tolist() == memory.get(np.float32, DATA.shape, 64).tolist()


async def test_a_new_region_may_have_the_name_of_one_that_is_used(
    waiting: tuple[Gate, RunningServer], memory: Memory
) -> None:
    """Both count towards the limits, and a request uses the region that its name had first."""
    held, server = waiting
    memory.put(DATA)
    async with stock_client("grpc.aio", server) as client:
        await register(client, memory)
        outputs = [wanted(client, SIZE, 64)]
        asked = asyncio.create_task(
            client.ask("infer", "waiting", [placed(client)], outputs=outputs)
        )
        await until(lambda: held.held == 1)
        files = open_files()
        await client.ask("unregister_system_shared_memory", "r")
        await client.ask("register_system_shared_memory", "r", memory.key, 64, offset=512)
        fault = await client.fault("register_system_shared_memory", "s", memory.key, 64)
        during = await listed(client)
        assert files + 1 == open_files()
        held.free()
        await asked
        await until(lambda: files == open_files())
        await register(client, memory, "s")

        assert "no more than 2 regions" in fault
        assert {("r", memory.key, 512, 64)} == during
        assert {*during, ("s", memory.key, 0, 4096)} == await listed(client)
    assert (2 * DATA).tolist() == memory.get(np.float32, DATA.shape, 64).tolist()


async def test_a_region_that_is_truncated_while_it_is_read_is_an_error(
    server: RunningServer, quick: Stock
) -> None:
    """No SIGBUS, and the file does not grow again, at any stage of a request."""
    elements = 1 << 19
    memory = Memory(4 * elements)
    shape = [elements // 4, 4]
    await register(quick, memory, size=4 * elements)
    tensor = quick.input("x", shape, "FP32")
    tensor.set_shared_memory("r", 4 * elements)
    output = wanted(quick, 4 * elements)
    stop = threading.Event()

    async def ask(outputs: Any) -> str:
        try:
            await quick.ask("infer", "echo", [tensor], outputs=outputs)
        except triton.InferenceServerException as error:
            return str(error.message())
        return ""

    truncating = asyncio.ensure_future(asyncio.to_thread(truncate_until, memory, stop))
    texts = [await ask([output] if index % 2 else None) for index in range(60)]
    stop.set()
    await truncating
    os.truncate(memory.path, 8)
    last = await ask(None)
    os.truncate(memory.path, 4 * elements)

    assert "" == await ask([output])
    assert "a file with 8 bytes, truncated after registration" in last
    assert all("truncated" in text for text in texts if text)
    shm.destroy_shared_memory_region(memory.handle)


def truncate_until(memory: Memory, stop: threading.Event) -> None:
    size = memory.path.stat().st_size
    while not stop.is_set():
        for part in (0, 4096, size // 2, size):
            os.truncate(memory.path, part)


async def test_in_place_a_truncated_region_is_seen_before_a_request(
    serve: Serve, models: Path, memory: Memory
) -> None:
    async with (
        serve(models, load_model=("echo",), shared_memory_in_place=True) as server,
        stock_client("grpc.aio", server) as client,
    ):
        await register(client, memory)
        os.truncate(memory.path, 8)
        text = await client.fault("infer", "echo", [placed(client)])
        os.truncate(memory.path, 4096)
        memory.put(DATA)
        # The same bytes are read and written: the model returns its input.
        outputs = [wanted(client, SIZE, 4)]
        await client.ask("infer", "echo", [placed(client)], outputs=outputs)

    assert "a file with 8 bytes, truncated after registration" in text
    assert DATA.tolist() == memory.get(np.float32, DATA.shape, 4).tolist()


async def test_an_output_may_replace_the_input(client: Stock, memory: Memory) -> None:
    memory.put(DATA)
    await register(client, memory)
    await client.ask("infer", "echo", [placed(client)], outputs=[wanted(client, SIZE, 8)])

    assert DATA.tolist() == memory.get(np.float32, DATA.shape, 8).tolist()


async def test_bytes_that_are_no_tensor_are_refused(quick: Stock, memory: Memory) -> None:
    memory.put(np.array([7] * 16, np.uint8))
    await register(quick, memory)
    bools, texts = quick.input("x", [4], "BOOL"), quick.input("x", [1], "BYTES")
    bools.set_shared_memory("r", 4)
    texts.set_shared_memory("r", 16)

    assert "BOOL bytes of 0 or 1" in await quick.fault("infer", "bools", [bools])
    assert "model 'texts', input 'x'" in await quick.fault("infer", "texts", [texts])


async def test_what_an_input_takes_is_held_by_its_connection(serve: Serve, models: Path) -> None:
    memory = Memory(4 << 20)
    async with (
        serve(models, load_model=("echo",), max_held_bytes=1 << 20) as server,
        stock_client("grpc.aio", server) as client,
    ):
        await register(client, memory, size=4 << 20)
        tensor = client.input("x", [1 << 18, 4], "FP32")
        tensor.set_shared_memory("r", 4 << 20)
        text = await client.fault("infer", "echo", [tensor])
        held = server.application.ledger.held
    shm.destroy_shared_memory_region(memory.handle)

    assert "no memory for the inputs in shared memory of 4194304 bytes" in text
    assert 0 == held


async def test_a_server_without_shared_memory_says_so(
    serve: Serve, models: Path, memory: Memory
) -> None:
    async with serve(
        models, load_model=("echo",), shared_memory="none", http_endpoint="port:0"
    ) as server:
        for kind in ("grpc.aio", "http.aio"):
            async with stock_client(kind, server) as client:
                texts = [
                    await client.fault("register_system_shared_memory", "r", memory.key, 64),
                    await client.fault("infer", "echo", [placed(client)]),
                ]
                await client.ask("unregister_system_shared_memory")
                metadata = await client.ask("get_server_metadata")
                names = metadata.extensions if "grpc" in kind else metadata["extensions"]

                assert {
                    "shared memory is turned off on this server: start it with shared_memory"
                } == set(texts)
                assert "system_shared_memory" not in names


async def test_clients_of_other_machines_may_not_name_it(
    serve: Serve, models: Path, memory: Memory
) -> None:
    """Unless a setting allows it: they would read this machine's memory."""
    address = own_address()
    for clients, texts in (
        ("local", ("is only for clients on this machine",) * 3),
        ("all", ("",) * 3),
    ):
        async with (
            serve(models, load_model=("echo",), host="0.0.0.0", shared_memory=clients) as server,
            stock_client("grpc.aio", server) as near,
        ):
            port = server.url.rpartition(":")[2]
            memory.put(DATA)
            await register(near, memory)
            elsewhere = replace(server, url=f"{address}:{port}")
            async with stock_client("grpc.aio", elsewhere) as far:
                got = [
                    await outcome(far, "register_system_shared_memory", "s", memory.key, 64),
                    await outcome(far, "infer", "echo", [placed(far)]),
                    await outcome(far, "unregister_system_shared_memory", "r"),
                ]

        assert [bool(text) for text in texts] == [bool(found) for found in got]
        assert all(text in found for text, found in zip(texts, got, strict=True))


def own_address() -> str:
    """Return a non-loopback address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # connecting a UDP socket sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


async def outcome(client: Stock, method: str, *args: Any) -> str:
    try:
        await client.ask(method, *args)
    except triton.InferenceServerException as error:
        return str(error.message())
    return ""


async def test_cuda_shared_memory_is_not_there(client: Stock) -> None:
    """Registration reports it; status and unregistration succeed."""
    text = await client.fault("register_cuda_shared_memory", "r", b"aGFuZGxl", 0, 64)
    status = await client.ask("get_cuda_shared_memory_status")
    await client.ask("unregister_cuda_shared_memory")
    await client.ask("unregister_cuda_shared_memory", "r")
    unknown = await client.fault("get_cuda_shared_memory_status", "r")

    assert "CUDA shared memory is not implemented by this server" == text
    assert not (status.regions if "grpc" in client.kind else status)
    assert "Unable to find cuda shared memory region: 'r', register it" == unknown


async def test_cuda_memory_is_registered_read_written_and_unregistered(
    client: Stock, server: RunningServer
) -> None:
    """As if JAX ran on CUDA, with a driver whose device memory is host memory."""
    cuda = FakeCuda()
    server.application.engine.regions.driver = CudaDriver(cuda)
    handle = cuda.share(64, 0)
    cuda.memory[handle][:SIZE] = DATA.view(np.uint8).ravel()
    await client.ask("register_cuda_shared_memory", "r", b64encode(handle), 1, 64)
    status = await client.ask("get_cuda_shared_memory_status", "r")
    twice = await client.fault("register_cuda_shared_memory", "r", b64encode(handle), 1, 64)
    wrong = await client.fault("register_cuda_shared_memory", "s", b64encode(b"\1" * 64), 0, 64)
    await client.ask("infer", "echo", [placed(client)], outputs=[wanted(client, SIZE, offset=SIZE)])
    metadata = await client.ask("get_server_metadata")
    await client.ask("unregister_cuda_shared_memory", "r")
    gone = await client.fault("infer", "echo", [placed(client)])

    rows = status if "http" in client.kind else [status.regions["r"]]
    assert [("r", 1, 64)] == [_cuda_row(row) for row in rows]
    assert "already in manager" in twice
    assert "is still allocated, got CUDA_ERROR_INVALID_HANDLE" in wrong
    assert DATA.tobytes() == cuda.memory[handle][SIZE : 2 * SIZE].tobytes()
    extensions = metadata["extensions"] if "http" in client.kind else metadata.extensions
    assert "cuda_shared_memory" in extensions
    assert "none with this name" in gone
    await until(lambda: not cuda.opened)


def _cuda_row(row: Any) -> tuple[str, int, int]:
    if isinstance(row, dict):
        return row["name"], row["device_id"], row["byte_size"]
    return row.name, row.device_id, row.byte_size


async def test_a_handle_that_is_no_base64_is_refused(server: RunningServer) -> None:
    server.application.engine.regions.driver = CudaDriver(FakeCuda())
    body = b'{"raw_handle": {"b64": "a"}, "byte_size": 64}'
    path = "/v2/cudasharedmemory/region/r/register"
    answer = await ask(str(server.http), "POST", path, body=body)

    assert 400 == answer.status
    assert "expected a raw_handle in base64" in answer.error


OTHER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
handle = (ctypes.c_ubyte * 64)()
for code in (
    cuda.cuInit(0),
    cuda.cuDeviceGet(ctypes.byref(device), 0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64)),
    cuda.cuMemsetD8_v2(address, ctypes.c_ubyte(7), ctypes.c_size_t(64)),
    cuda.cuCtxSynchronize(),
    cuda.cuIpcGetMemHandle(ctypes.byref(handle), address),
):
    assert code == 0, code
print(bytes(handle).hex(), flush=True)
sys.stdin.readline()
"""
"""Shares 64 bytes of its GPU until it is told to exit."""


@pytest.mark.gpu
def test_memory_of_another_process_on_a_gpu_is_read_and_written() -> None:
    driver = open_driver()
    if driver is None:
        pytest.skip(
            "the NVIDIA driver (libcuda.so.1) is missing; in a container, install the NVIDIA"
            " container toolkit"
        )
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        regions = Regions()
        regions.driver = driver
        cuda_regions = CudaRegions(regions)
        cuda_regions.register(NOBODY, "r", bytes.fromhex(other.stdout.readline()), 0, 64)
        region = regions.find(NOBODY, "r")
        region.write(8, [b"abc"])
        found = np.zeros(16, np.uint8)
        region.read(0, found)
        del region
        cuda_regions.unregister(NOBODY, "r")
        other.communicate("\n")

    assert b"\7" * 8 + b"abc" + b"\7" * 5 == found.tobytes()


async def test_answered_requests_leave_no_region_behind(
    client: Stock, server: RunningServer, memory: Memory
) -> None:
    memory.put(DATA)
    await register(client, memory)
    region = weakref.ref(server.application.engine.regions.find(NOBODY, "r"))
    for index in range(3):
        outputs = [wanted(client, SIZE, 64)] if index else None
        await client.ask("infer", "echo", [placed(client)], outputs=outputs)
    await client.fault("infer", "echo", [placed(client)], outputs=[wanted(client, 4, 64)])
    await client.ask("unregister_system_shared_memory", "r")
    gc.collect()

    assert region() is None


@pytest.mark.parametrize("beside", ["raw", "contents", "too many"])
async def test_an_input_in_shared_memory_has_no_elements_in_the_message(
    server: RunningServer, memory: Memory, beside: str
) -> None:
    """However often it is sent."""
    request = pb.ModelInferRequest(model_name="echo")
    request.inputs.add(name="x", datatype="FP32", shape=DATA.shape)
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = SIZE
    if beside == "contents":
        request.inputs[0].contents.fp32_contents.extend([1] * 4)
    else:
        request.raw_input_contents.extend([bytes(SIZE)] * (1 + (beside == "too many")))
    async with grpc.aio.insecure_channel(server.url) as channel:
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ModelInfer(request)

            assert grpc.StatusCode.INVALID_ARGUMENT is refused.value.code()
            text = str(refused.value.details())
            assert (
                "raw_input_contents" in text
                or "no contents field together with shared_memory_region" in text
            )


async def test_requests_of_one_form_name_their_own_places(
    server: RunningServer, quick: Stock, memory: Memory
) -> None:
    """Even if the server knows the form by its bytes, or only some inputs are in shared memory."""
    memory.put(DATA, 2 * DATA)
    await register(quick, memory)
    for index in range(6):
        offset = SIZE * (index % 2)
        outputs = [wanted(quick, SIZE, 512)] if index > 3 else None
        answer = await quick.ask(
            "infer", "echo", [placed(quick, SIZE, offset)], outputs=outputs, request_id=f"{index}"
        )
        found = memory.get(np.float32, DATA.shape, 512) if outputs else answer.as_numpy("y")

        assert ((1 + index % 2) * DATA).tolist() == found.tolist()
        assert f"{index}" == answer.get_response().id
