"""Requests whose form is cached: whatever may have changed is checked again."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import json
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support import identity_models
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

TIMES = 4
"""The layout of a message is cached from the second time on, its form from the third."""
VALUES = 4
_BYTES = 4 * VALUES


def request(*, outputs: bool = True) -> pb.ModelInferRequest:
    """Return a request that names outputs, which the quick check leaves to the full one."""
    asked = pb.ModelInferRequest(model_name="echo")
    asked.inputs.add(name="x", datatype="FP32", shape=[VALUES])
    if outputs:
        asked.outputs.add(name="y")
    return asked


def infer(values: np.ndarray) -> pb.ModelInferRequest:
    asked = request()
    asked.raw_input_contents.append(values.tobytes())
    return asked


async def refusal(stub: Any, asked: pb.ModelInferRequest) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(asked)
    assert grpc.StatusCode.INVALID_ARGUMENT is caught.value.code()
    return caught.value.details() or ""


async def test_a_form_is_checked_again_for_a_model_that_was_loaded_again(
    serve: Serve, tmp_path: Path
) -> None:
    root, ones = tmp_path / "models", np.ones(VALUES, np.float32)
    identity_models.write(root, "echo", "FP32")
    async with serve(root, load_model=("echo",)) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            for number in range(TIMES):
                answer = await stub.ModelInfer(infer(ones * number))
                assert (ones * number).tobytes() == answer.raw_output_contents[0]
            told = []
            for config in ("FP64", "FP32"):
                text = (root / "echo" / "config.json").read_text()
                other = {"FP64": ("FP32", "FP64"), "FP32": ("FP64", "FP32")}[config]
                (root / "echo" / "config.json").write_text(text.replace(*other))
                await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="echo"))
                if config == "FP64":
                    told = [await refusal(stub, infer(ones)) for _ in range(TIMES)]
            answers = [await stub.ModelInfer(infer(ones)) for _ in range(TIMES)]

    assert ["model 'echo', input 'x': expected FP64[-1], got FP32[4]"] * TIMES == told
    assert [ones.tobytes()] * TIMES == [answer.raw_output_contents[0] for answer in answers]


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """Shared memory for an input and an output."""
    made = SharedMemory(create=True, size=2 * _BYTES)
    yield made
    made.close()
    made.unlink()


def place(of: Any, offset: int) -> None:
    """Place a tensor in shared memory."""
    of.parameters["shared_memory_region"].string_param = "region"
    of.parameters["shared_memory_byte_size"].int64_param = _BYTES
    of.parameters["shared_memory_offset"].int64_param = offset


async def test_what_a_known_form_names_in_shared_memory_is_read_and_found_anew(
    serve: Serve, tmp_path: Path, memory: SharedMemory
) -> None:
    """Its values are read each time, from the region that currently has the name."""
    identity_models.write(tmp_path / "models", "echo", "FP32")
    asked = request()
    place(asked.inputs[0], 0)
    place(asked.outputs[0], _BYTES)
    assert memory.buf is not None
    view = np.frombuffer(memory.buf, np.float32)
    async with serve(tmp_path / "models", load_model=("echo",)) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

            async def register(size: int) -> None:
                await stub.SystemSharedMemoryUnregister(
                    pb.SystemSharedMemoryUnregisterRequest(name="region")
                )
                await stub.SystemSharedMemoryRegister(
                    pb.SystemSharedMemoryRegisterRequest(
                        name="region", key=f"/{memory.name.lstrip('/')}", byte_size=size
                    )
                )

            await register(2 * _BYTES)
            seen = []
            for number in range(TIMES):
                view[:VALUES] = number
                await stub.ModelInfer(asked)
                seen.append(view[VALUES:].tolist())
            await register(_BYTES)
            too_short = [await refusal(stub, asked) for _ in range(TIMES)]
            await stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest())
            nowhere = [await refusal(stub, asked) for _ in range(TIMES)]
    del view

    assert [[number] * VALUES for number in range(TIMES)] == seen
    assert len({*too_short}) == len({*nowhere}) == 1
    assert "offset and size within its 16 bytes" in too_short[0]
    assert "a registered region" in nowhere[0]


async def test_an_answer_is_not_kept_by_a_message_whose_inputs_are_elsewhere(
    serve: Serve, tmp_path: Path, memory: SharedMemory
) -> None:
    """The response cache also looks up requests by their bytes."""
    identity_models.write(tmp_path / "models", "echo", "FP32")
    config = tmp_path / "models" / "echo" / "config.json"
    cached = {**json.loads(config.read_text()), "response_cache": {"enable": True}}
    config.write_text(json.dumps(cached))
    asked = request()
    place(asked.inputs[0], 0)
    assert memory.buf is not None
    view = np.frombuffer(memory.buf, np.float32)
    seen = []
    async with serve(
        tmp_path / "models", load_model=("echo",), response_cache_bytes=1 << 20
    ) as server:
        async with grpc.aio.insecure_channel(server.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            await stub.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(
                    name="region", key=f"/{memory.name.lstrip('/')}", byte_size=_BYTES
                )
            )
            for number in (1, 1, 1, 2, 2, 1, 3):
                view[:VALUES] = number
                answer = await stub.ModelInfer(asked)
                seen.append(np.frombuffer(answer.raw_output_contents[0], np.float32).tolist())
    del view

    assert [[number] * VALUES for number in (1, 1, 1, 2, 2, 1, 3)] == seen
