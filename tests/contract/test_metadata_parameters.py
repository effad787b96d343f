"""Model and tensor parameters in ModelMetadata, over gRPC and REST."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from support.http import ask
from support.server import Serve

from xlaserve_proto import inference as ours

LABELS = ["cat", "dog", "naïve"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a complete configuration, and one without any."""
    root = tmp_path_factory.mktemp("models")
    for name in ("said", "silent"):
        (root / name / "1").mkdir(parents=True)
        image: dict[str, Any] = {"name": "x", "data_type": "TYPE_FP32", "dims": [2, 2, 3]}
        config: dict[str, Any] = {
            "backend": "identity",
            "max_batch_size": 4,
            "input": [image],
            "output": [image | {"name": "y"}],
        }
        if name == "said":
            texts = {"content_type": "pd", "content_type.x": "np", "owner": "A", "long": "x" * 128}
            config["input"][0] = image | {"format": "FORMAT_NHWC"}
            config["output"][0] |= {"label_filename": "labels.txt"}
            config["parameters"] = {key: {"string_value": text} for key, text in texts.items()}
            (root / name / "labels.txt").write_text("\n".join(LABELS))
        (root / name / "config.json").write_text(json.dumps(config))
    return root


async def raw_metadata(url: str, model: str) -> bytes:
    async with grpc.aio.insecure_channel(url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")
        answer: bytes = await call(bytes(ours.ModelMetadataRequest(name=model)))
        return answer


def texts(parameters: Any) -> dict[str, str]:
    return {name: value.string_param for name, value in parameters.items()}


async def test_they_come_from_the_configuration(serve: Serve, repository: Path) -> None:
    models = ("said", "silent")
    async with serve(repository, load_model=models, http_endpoint="port:0") as server:
        said, silent = [
            ours.ModelMetadataResponse().parse(await raw_metadata(server.url, name))
            for name in models
        ]
        by_rest, silent_by_rest = [
            json.loads((await ask(str(server.http), "GET", f"/v2/models/{name}")).body)
            for name in models
        ]

    assert {"content_type": "pd", "owner": "A"} == texts(said.parameters) == by_rest["parameters"]
    of_x = {"content_type": "np", "format": "FORMAT_NHWC"}
    assert of_x == texts(said.inputs[0].parameters) == by_rest["inputs"][0]["parameters"]
    of_y = texts(said.outputs[0].parameters)
    assert of_y == by_rest["outputs"][0]["parameters"]
    assert LABELS == json.loads(of_y["labels"])
    assert ["labels"] == list(of_y)
    for one in (silent, silent.inputs[0], silent.outputs[0]):
        assert {} == one.parameters
    assert {"name", "versions", "platform", "inputs", "outputs"} == set(silent_by_rest)
    assert {"name", "datatype", "shape"} == set(silent_by_rest["inputs"][0])


async def test_a_client_of_the_open_inference_protocol_reads_them(
    serve: Serve, repository: Path
) -> None:
    """Its map has string values: what it reads is odd, but not an error."""
    file = descriptor_pb2.FileDescriptorProto(name="oip.proto", package="oip", syntax="proto3")
    message = file.message_type.add(name="ModelMetadataResponse")
    entry = message.nested_type.add(name="PropertiesEntry")
    entry.options.map_entry = True
    kind = descriptor_pb2.FieldDescriptorProto
    entry.field.add(name="key", number=1, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    message.field.add(name="name", number=1, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    message.field.add(
        name="properties",
        number=6,
        type=kind.TYPE_MESSAGE,
        label=kind.LABEL_REPEATED,
        type_name=".oip.ModelMetadataResponse.PropertiesEntry",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    read: Any = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("oip.ModelMetadataResponse")
    )
    async with serve(repository, load_model=("said",)) as server:
        found = read.FromString(await raw_metadata(server.url, "said"))

    assert "said" == found.name
    assert {"content_type", "owner"} == set(found.properties)
