"""Serves FP8 E4M3 over every protocol and writes the answers as JSON.

Run by tests/test_datatype_recipe.py with a patched copy of the package, whose datatype table has a
row for FP8 E4M3, on the path.
"""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tritonclient.grpc import service_pb2

import xlaserve
from support import identity_models, python_models
from support.server import RunningServer, serving
from xlaserve.client import AsyncClient
from xlaserve.http.sagemaker.npy import read_npy, write_npy
from xlaserve.tensors import (
    DATATYPES,
    TensorDataError,
    datatype_of,
    from_bytes,
    from_elements,
    to_bytes,
)

FP8 = ml_dtypes.float8_e4m3fn
VALUES = np.array([1.5, -448.0, 0.0, 0.015625], FP8)
RAW = VALUES.tobytes()
NAME = "FP8"
ANSWERED = "answered.json"
METHOD = "/inference.GRPCInferenceService/"
MODELS = ("jax", "identity", "thread", "process")
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }'
CONFIG = """
input [{ name: "x", data_type: TYPE_FP8, dims: [ -1 ] }]
output [{ name: "y", data_type: TYPE_FP8, dims: [ -1 ] }]
"""


def write_models(root: Path) -> None:
    """Write a model of each kind; each returns the absolute value of `x` as `y`."""
    xlaserve.export_model(
        lambda p, x: {"y": jnp.abs(x)},
        None,
        {"x": (NAME, [-1, 4])},
        root / "jax" / "1",
        max_batch_size=4,
    )
    identity_models.write(root, "identity", NAME)
    for name, more in (("thread", ""), ("process", PROCESS)):
        python_models.write_function(root, name, "return {'y': np.abs(x)}", CONFIG + more)


def elements() -> Mapping[str, object]:
    """What the table alone has to know."""
    row = DATATYPES[NAME]

    def refused(*values: float) -> str:
        try:
            return str(from_elements(row, (len(values),), list(values)))
        except TensorDataError as error:
            return str(error)

    file = memoryview(b"".join(bytes(part) for part in write_npy(VALUES)))
    return {
        "of its dtype": datatype_of(FP8) is row,
        "bytes": bytes(to_bytes(row, VALUES)) == RAW,
        "from bytes": from_bytes(row, (4,), RAW).tobytes() == RAW,
        "from elements": from_elements(row, (4,), VALUES.tolist()).tobytes() == RAW,
        "NaN stays": bool(np.isnan(from_elements(row, (1,), [float("nan")]))[0]),
        "too large": refused(1e9),
        "of its own": from_elements(row, (4,), VALUES).tobytes() == RAW,
        "file": read_npy(row, file).tobytes() == RAW,
    }


def asked(model: str, *, typed: bool = False) -> Any:
    shape = [1, 4] if model == "jax" else [4]
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="x", datatype=NAME, shape=shape)
    if typed:
        tensor.contents.fp32_contents.extend(VALUES.tolist())
    else:
        request.raw_input_contents.append(RAW)
    return request


async def over_grpc(server: RunningServer, model: str) -> list[object]:
    """Send three raw requests, then one with typed contents, which has no field for FP8."""
    found: list[object] = []
    async with grpc.aio.insecure_channel(server.url) as channel:
        call = channel.unary_unary(METHOD + "ModelInfer")
        for _ in range(3):
            answer = service_pb2.ModelInferResponse.FromString(
                await call(asked(model).SerializeToString(), timeout=60)
            )
            found.append([answer.outputs[0].datatype, answer.raw_output_contents[0].hex()])
        try:
            await call(asked(model, typed=True).SerializeToString(), timeout=60)
        except grpc.aio.AioRpcError as error:
            found.append(f"{error.code().name} {error.details()}")
    return found


async def over_http(server: RunningServer, model: str) -> Mapping[str, object]:
    """Send binary, .npy and JSON requests, and one that asks for classification."""
    shape = [1, 4] if model == "jax" else [4]
    tensor = {"name": "x", "shape": shape, "datatype": NAME}
    url = f"http://{server.http}/v2/models/{model}"
    head = {"inputs": [tensor | {"parameters": {"binary_data_size": 4}}]}
    answered: dict[str, object] = {}
    async with aiohttp.ClientSession() as session:

        async def binary(name: str, read: Callable[[bytes, bytes], object], **more: Any) -> None:
            text = json.dumps(head | more).encode()
            headers = {"Inference-Header-Content-Length": str(len(text))}
            async with session.post(f"{url}/infer", data=text + RAW, headers=headers) as answer:
                body = await answer.read()
                size = int(answer.headers.get("Inference-Header-Content-Length", len(body)))
                answered[name] = read(body[:size], body[size:])

        await binary(
            "binary",
            lambda _, data: data.hex(),
            parameters={"binary_data_output": True},
        )
        await binary("JSON", lambda text, _: json.loads(text).get("error"))
        await binary(
            "classes",
            lambda text, _: json.loads(text)["outputs"][0]["data"],
            outputs=[{"name": "y", "parameters": {"classification": 2, "binary_data": False}}],
        )
        file = b"".join(bytes(part) for part in write_npy(VALUES.reshape(shape)))
        headers = {"Content-Type": "application/x-npy", "Accept": "application/x-npy"}
        bare = f"http://{server.http}/models/{model}/invoke"
        async with session.post(bare, data=file, headers=headers) as answer:
            answered["npy"] = (await answer.read())[-4:].hex()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        text = json.dumps(VALUES.reshape(shape).tolist())
        async with session.post(bare, data=text, headers=headers) as answer:
            answered["bare JSON"] = await answer.json()
        body = json.dumps({"inputs": [tensor | {"data": VALUES.tolist()}]})
        async with session.post(f"{url}/infer", data=body) as answer:
            answered["typed JSON"] = (await answer.json()).get("error")
    return answered


async def by_client(server: RunningServer, model: str) -> str:
    """Infer with our own client, which derives the datatype from the dtype."""
    async with AsyncClient(server.url) as client:
        answer = await client.infer(
            model, {"x": VALUES.reshape(1, 4) if model == "jax" else VALUES}
        )
        return bytes(np.asarray(answer["y"]).tobytes()).hex()


async def by_memory(server: RunningServer, model: str) -> str:
    """Infer with input and output in shared memory."""
    region = shared_memory.SharedMemory(create=True, size=8)
    held = region.buf
    assert held is not None
    try:
        held[:4] = RAW
        body = {"key": region.name, "offset": 0, "byte_size": 8}
        tensor = {"name": "x", "shape": [1, 4] if model == "jax" else [4], "datatype": NAME}
        place = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        request = {
            "inputs": [tensor | {"parameters": place}],
            "outputs": [{"name": "y", "parameters": place | {"shared_memory_offset": 4}}],
        }
        url = f"http://{server.http}/v2"
        async with aiohttp.ClientSession() as session:
            for path, sent in (
                ("systemsharedmemory/region/r/register", body),
                (f"models/{model}/infer", request),
                ("systemsharedmemory/region/r/unregister", {}),
            ):
                async with session.post(f"{url}/{path}", json=sent) as answer:
                    if answer.status != 200:
                        return await answer.text()
        return bytes(held[4:8]).hex()
    finally:
        del held
        region.close()
        region.unlink()


async def main(root: Path) -> None:
    """Write the answers over every protocol to a file in the directory."""
    write_models(root / "models")
    found: dict[str, Any] = {"elements": elements()}
    async with serving(
        root / "scratch",
        root / "models",
        http_endpoint="port:0",
        allow_python_models=True,
        load_model=("*",),
    ) as server:
        for model in MODELS:
            found[model] = {
                "grpc": await over_grpc(server, model),
                "http": await over_http(server, model),
                "client": await by_client(server, model),
                "memory": await by_memory(server, model),
            }
    (root / ANSWERED).write_text(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
