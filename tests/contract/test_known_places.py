"""Cached shared memory references of repeated requests; every change is noticed."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import grpc
import numpy as np
import pytest
from support import identity_models
from support.conditions import until
from support.server import RunningServer, Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.serving import engine
from xlaserve.serving.inputs.output_forms import OutputForms
from xlaserve.serving.inputs.shared_tensors import SharedInputs

SHAPE = (1, 4)
SIZE = 16
INPUT_AT, OUTPUT_AT = 64, 256
FILE_BYTES = 4096
FORWARDED = (("x-forwarded-for", "203.0.113.7"),)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    identity_models.write(root, "echo", "FP32", (-1, 4))
    return root


class Memory:
    """A test's shared memory file."""

    def __init__(self) -> None:
        self.key = f"/xlaserve-{uuid4().hex}"
        self.path = Path("/dev/shm", self.key[1:])
        self.path.write_bytes(bytes(FILE_BYTES))

    def put(self, octets: bytes, offset: int) -> None:
        """Write bytes at an offset."""
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(octets)

    def get(self, offset: int, size: int = SIZE) -> bytes:
        """Return bytes at an offset."""
        return self.path.read_bytes()[offset : offset + size]


@pytest.fixture
async def memories() -> AsyncIterator[tuple[Memory, Memory]]:
    made = Memory(), Memory()
    yield made
    for memory in made:
        memory.path.unlink()


@asynccontextmanager
async def client(server: RunningServer) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(server.url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def place(tensor: Any, offset: int, size: int = SIZE) -> None:
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = size
    tensor.parameters["shared_memory_offset"].int64_param = offset


def asking(
    model: str = "echo",
    shape: tuple[int, int] = SHAPE,
    *,
    of_input: bool = True,
    of_output: bool = True,
) -> Any:
    """Return a request with its input or its output in the region `r`."""
    request = pb.ModelInferRequest(model_name=model)
    size = shape[0] * shape[1] * 4
    request.inputs.add(name="x", datatype="FP32", shape=shape)
    if of_input:
        place(request.inputs[0], INPUT_AT, size)
    else:
        request.raw_input_contents.append(bytes(size))
    if of_output:
        request.outputs.add(name="y")
        place(request.outputs[0], OUTPUT_AT)
    return request


async def register(stub: Any, memory: Memory, offset: int = 0, size: int = 1024) -> None:
    await stub.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(
            name="r", key=memory.key, offset=offset, byte_size=size
        )
    )


async def unregister(stub: Any) -> None:
    await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name="r"))


async def outcome(stub: Any, request: Any, metadata: Any = ()) -> str:
    try:
        await stub.ModelInfer(request, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return str(error.details())
    return ""


# --- Changes between requests --------------------------------------------------------------------


class Story:
    """Equal requests, and the changes between them."""

    def __init__(self, random: Random, stub: Any, memories: tuple[Memory, Memory]) -> None:
        self.random, self.stub, self.memories = random, stub, memories
        self.region: tuple[Memory, int, int] | None = None
        self.truncated = False

    async def register(self) -> None:
        await unregister(self.stub)
        for memory in self.memories:
            os.truncate(memory.path, FILE_BYTES)
        self.truncated = False
        memory = self.random.choice(self.memories)
        offset, size = self.random.choice(((0, 1024), (128, 1024), (512, 1024), (0, 72), (0, 264)))
        await register(self.stub, memory, offset, size)
        self.region = memory, offset, size

    async def unregister(self) -> None:
        await unregister(self.stub)
        self.region = None

    async def truncate(self) -> None:
        if self.region is not None:
            os.truncate(self.region[0].path, self.random.choice((8, 70)))
            self.truncated = True

    async def restore(self) -> None:
        if self.region is not None:
            os.truncate(self.region[0].path, FILE_BYTES)
            self.truncated = False

    async def nothing(self) -> None:
        """Change nothing."""

    async def ask(self, request: Any) -> None:
        """Send a request directly and through a proxy, and compare the answers."""
        octets = self.random.randbytes(SIZE - 4) + bytes(4)
        if self.region is not None and not self.truncated:
            memory, offset, _ = self.region
            memory.put(octets, offset + INPUT_AT)
            memory.put(bytes(SIZE), offset + OUTPUT_AT)
        text = await outcome(self.stub, request)
        behind = await outcome(self.stub, request, FORWARDED)

        assert "is only for clients on this machine" in behind
        if self.region is None:
            assert "a registered region, got none with this name" in text
        elif self.truncated or self.region[2] < OUTPUT_AT + SIZE:
            small = "offset and size within its" if self.region[2] < OUTPUT_AT + SIZE else "-"
            assert small in text or (self.truncated and "truncated" in text)
        else:
            assert not text
            memory, offset, _ = self.region
            assert octets == memory.get(offset + OUTPUT_AT)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seed", range(5))
async def test_a_region_that_changes_is_noticed(
    serve: Serve, models: Path, memories: tuple[Memory, Memory], seed: int, in_place: bool
) -> None:
    """In mixed order; between changes, the request is cached again each time."""
    random = Random(f"{seed} {in_place}")
    settings = {"load_model": ("echo",), "shared_memory_in_place": in_place}
    async with serve(models, **settings) as server, client(server) as stub:
        story, request = Story(random, stub, memories), asking()
        steps = [story.register, story.unregister, story.truncate, story.restore, story.nothing]
        for step in random.choices(steps, weights=(5, 1, 2, 2, 1), k=16):
            await step()
            for _ in range(3):
                await story.ask(request)

        assert server.application.ledger.held == 0


# --- Repeated requests ---------------------------------------------------------------------------


class Counted:
    """A class that counts its instances."""

    def __init__(self, made: Callable[..., object]) -> None:
        self._made = made
        self.count = 0

    def __call__(self, *given: Any, **more: Any) -> object:
        self.count += 1
        return self._made(*given, **more)


@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("of_output", [True, False])
async def test_a_request_that_repeats_is_not_looked_at_again(
    serve: Serve,
    models: Path,
    memories: tuple[Memory, Memory],
    monkeypatch: pytest.MonkeyPatch,
    of_input: bool,
    of_output: bool,
) -> None:
    """Its elements are read each time, wherever they are."""
    inputs, forms = Counted(SharedInputs), Counted(OutputForms)
    request = asking(of_input=of_input, of_output=of_output)
    memory = memories[0]
    async with serve(models, load_model=("echo",)) as server, client(server) as stub:
        await register(stub, memory)
        for _ in range(3):
            await stub.ModelInfer(request)
        monkeypatch.setattr(engine, "SharedInputs", inputs, raising=True)
        monkeypatch.setattr(engine, "OutputForms", forms, raising=True)
        for number in range(5):
            octets = bytes((number,)) * SIZE
            memory.put(octets, INPUT_AT)
            if not of_input:
                request.raw_input_contents[0] = octets
            answer = await stub.ModelInfer(request)

            assert octets == (memory.get(OUTPUT_AT) if of_output else answer.raw_output_contents[0])

    assert (0, 0) == (inputs.count, forms.count)


async def test_what_a_thread_reads_is_read_each_time(
    serve: Serve, models: Path, memories: tuple[Memory, Memory]
) -> None:
    """Large inputs, whose regions may disappear after they have been read."""
    shape = (1 << 15, 4)
    memory = memories[0]
    request, far = asking(shape=shape), 1 << 20
    os.truncate(memory.path, far + (1 << 20))
    place(request.outputs[0], far, 4 << 17)
    async with serve(models, load_model=("echo",)) as server, client(server) as stub:
        await register(stub, memory, size=far + (1 << 20))
        for number in range(5):
            octets = np.full(shape, number, np.float32).tobytes()
            memory.put(octets, INPUT_AT)
            await stub.ModelInfer(request)

            assert octets == memory.get(far, len(octets))
        await unregister(stub)

        assert "none with this name" in await outcome(stub, request)


async def test_a_version_that_replaces_another_looks_for_itself(
    serve: Serve, tmp_path: Path, memories: tuple[Memory, Memory]
) -> None:
    """What the old version accepted does not count for the new one."""
    identity_models.write(tmp_path, "echo", "FP32", (1, 4))
    async with serve(tmp_path, load_model=("echo",)) as server, client(server) as stub:
        await register(stub, memories[0])
        for _ in range(4):
            await stub.ModelInfer(asking())
        config = tmp_path / "echo" / "config.json"
        config.write_text(config.read_text().replace("[1, 4]", "[2, 2]"))
        await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="echo"))

        assert "model 'echo', input 'x'" in await outcome(stub, asking())


# --- Memory limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [3000, 8000])
async def test_without_memory_a_known_request_is_refused_like_any_other(
    serve: Serve, models: Path, memories: tuple[Memory, Memory], rows: int
) -> None:
    """There is memory for the message, but not for its input."""
    os.truncate(memories[0].path, 1 << 20)
    request = asking(shape=(rows, 4), of_output=False)
    async with serve(models, load_model=("echo",), max_held_bytes=16 << 20) as server:
        ledger = server.application.ledger
        async with client(server) as stub:
            await register(stub, memories[0], size=1 << 20)
            for _ in range(4):
                await stub.ModelInfer(request)
            other = ledger.open()
            other.hold(ledger.limit - (500 << 10))
            refused = await outcome(stub, request)
            other.release(ledger.limit - (500 << 10))
            after = await outcome(stub, request)

        assert "no memory for" in refused
        assert not after
        assert 0 == ledger.held


async def test_a_known_request_that_waits_holds_its_inputs(
    serve: Serve, models: Path, memories: tuple[Memory, Memory]
) -> None:
    """As many bytes as an uncached request, until it is answered."""
    request, station = asking(of_output=False), Keeping()
    async with serve(models, load_model=("echo",)) as server, client(server) as stub:
        ledger, regions = server.application.ledger, server.application.engine.regions
        await register(stub, memories[0])
        for _ in range(4):
            await stub.ModelInfer(request)
        _, instance = server.application.registry.resolve("echo")
        served: Any = instance
        served.station = station
        held = []
        for is_known in (True, False):
            if not is_known:
                regions.known.clear()
            asked = asyncio.ensure_future(outcome(stub, request))
            await until(lambda: bool(station.calls))
            held.append(ledger.held)
            station.calls.pop().cancel()
            asked.cancel()

        assert held[0] == held[1] > len(request.SerializeToString())
        await until(lambda: not ledger.held)


class Keeping:
    """A station that never answers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, call: Any) -> None:
        """Store a call."""
        self.calls.append(call)


async def test_a_region_that_takes_the_place_of_another_is_the_one_that_is_read(
    serve: Serve, models: Path, memories: tuple[Memory, Memory]
) -> None:
    """Two regions with one name may be admitted before either is opened; the last one wins."""
    first, second = memories
    first.put(b"\1" * SIZE, INPUT_AT)
    second.put(b"\2" * SIZE, INPUT_AT)
    request = asking(of_output=False)
    answers = []
    async with serve(models, load_model=("echo",)) as server, client(server) as stub:
        regions = server.application.engine.regions
        await register(stub, second)
        (region,) = regions.status("r")
        await unregister(stub)
        await register(stub, first)
        for _ in range(3):
            answers.append((await stub.ModelInfer(request)).raw_output_contents[0])
        regions.keep(region, "r")
        for _ in range(3):
            answers.append((await stub.ModelInfer(request)).raw_output_contents[0])

    assert [b"\1" * SIZE] * 3 + [b"\2" * SIZE] * 3 == answers
