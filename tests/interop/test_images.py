"""Encoded images over gRPC, in the form sent by the clients of OVMS."""

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio as triton
from PIL import Image
from support.server import serving
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

pb: Any = service_pb2
"""Its classes are created at run time, which type checkers cannot see."""

SEVEN = Path(__file__).resolve().parents[2] / "examples" / "data" / "seven.png"


def as_jpeg() -> bytes:
    """An image of a seven in color, much larger than the model's input."""
    data = io.BytesIO()
    with Image.open(SEVEN) as image:
        image.resize((640, 640)).convert("RGB").save(data, "JPEG")
    return data.getvalue()


pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = pytest.mark.parametrize("image", [SEVEN.read_bytes(), as_jpeg()], ids=["PNG", "JPEG"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(
    tmp_path_factory: pytest.TempPathFactory, example_models: Path, programs: str
) -> AsyncIterator[str]:
    scratch = tmp_path_factory.mktemp("scratch")
    settings = {"load_model": ("digits",), "compilation_cache_directory": programs}
    async with serving(scratch, example_models, **settings) as server:
        yield server.url


@pytest_asyncio.fixture(loop_scope="module")
async def client(url: str) -> AsyncIterator[Any]:
    async with triton.InferenceServerClient(url) as connection:
        yield connection


async def infer(client: Any, *images: bytes) -> Any:
    """Send images as tritonclient does: raw, each preceded by its length."""
    tensor = triton.InferInput("image", [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, object))
    return (await client.infer("digits", [tensor])).as_numpy("probabilities")


def request(**more: Any) -> Any:
    tensor = pb.ModelInferRequest.InferInputTensor(name="image", datatype="BYTES", shape=[1])
    return pb.ModelInferRequest(model_name="digits", inputs=[tensor], **more)


async def ask(url: str, asked: Any) -> int:
    async with grpc.aio.insecure_channel(url) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer = await call(asked)
    return int(np.argmax(np.frombuffer(answer.raw_output_contents[0], np.float32)))


@FILES
async def test_an_image_with_its_length_is_classified(client: Any, image: bytes) -> None:
    probabilities = await infer(client, image)

    assert 7 == np.argmax(probabilities)
    assert probabilities.max() > 0.9


@FILES
async def test_an_image_as_typed_contents_is_classified(url: str, image: bytes) -> None:
    asked = request()
    asked.inputs[0].contents.bytes_contents.append(image)

    assert 7 == await ask(url, asked)


@FILES
async def test_a_single_image_without_its_length_is_classified(url: str, image: bytes) -> None:
    assert 7 == await ask(url, request(raw_input_contents=[image]))


async def test_images_of_several_kinds_make_a_batch(client: Any) -> None:
    probabilities = await infer(client, SEVEN.read_bytes(), as_jpeg(), SEVEN.read_bytes())

    assert [7, 7, 7] == np.argmax(probabilities, axis=1).tolist()


async def test_what_is_no_image_is_an_invalid_argument(client: Any) -> None:
    """OVMS returns UNKNOWN, which clients would take for a server error."""
    with pytest.raises(InferenceServerException) as refused:
        await infer(client, SEVEN.read_bytes(), as_jpeg()[:-500])

    assert "StatusCode.INVALID_ARGUMENT" == refused.value.status()
    assert "model 'digits', input 'image'" in str(refused.value.message())
    assert "as element 1, got a broken one" in str(refused.value.message())
