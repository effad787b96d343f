"""An imported ONNX model with its former Triton configuration."""

# pyright: reportAttributeAccessIssue=false
# protobuf creates the classes of service_pb2 at import, so type checkers do not see them.

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed")

from onnx import TensorProto
from structlog.testing import capture_logs
from support.onnx_models import model, node, save
from support.server import Serve
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from xlaserve.importers.onnx.importing import Options, import_model

TENSORS = """
    input [ { name: "a" data_type: TYPE_FP32 dims: [ 3 ] } ]
    input [ { name: "b" data_type: TYPE_FP32 dims: [ 3 ] } ]
    input [ { name: "c" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] label_filename: "labels.txt" } ]
"""

FROM_TRITON = f"""
    name: "m"
    platform: "onnxruntime_onnx"
    backend: "onnxruntime"
    max_batch_size: 8
    {TENSORS}
    default_model_filename: "model.onnx"
    instance_group [ {{ count: 1 kind: KIND_CPU }} ]
    dynamic_batching {{ max_queue_delay_microseconds: 100 }}
    optimization {{
      execution_accelerators {{ gpu_execution_accelerator: [ {{ name: "tensorrt" }} ] }}
    }}
    parameters {{ key: "intra_op_thread_count" value: {{ string_value: "1" }} }}
"""

CONTRADICTING = {
    'input [ { name: "a" data_type: TYPE_FP32 dims: [ 3 ] } ]': (
        "the configuration lists 1 inputs, expected none or the 3 of the artifact; missing: 'b',"
        " 'c'"
    ),
    TENSORS.replace('"b" data_type: TYPE_FP32', '"b" data_type: TYPE_INT32'): (
        "input 'b': expected FP32[-1,3] as in the artifact, got INT32[-1,3]"
    ),
    TENSORS.replace('"y" data_type: TYPE_FP32 dims: [ 3 ]', '"y" data_type: TYPE_FP32 dims: 4'): (
        "output 'y': expected FP32[-1,3] as in the artifact, got FP32[-1,4]"
    ),
    TENSORS.replace('"c"', '"d"'): "input 'd' is not in the artifact, which has 'a', 'b', 'c'",
    'platform: "tensorrt_plan"': "unknown platform 'tensorrt_plan' in the configuration",
    'default_model_filename: "model.plan"': (
        "default_model_filename: expected one of model.jaxexp, model.json, model.stablehlo, as"
        " for jax_export models, got 'model.plan'"
    ),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An imported model with three inputs."""
    folder = tmp_path_factory.mktemp("onnx")
    inputs: Any = dict.fromkeys(("a", "b", "c"), (TensorProto.FLOAT, ("n", 3)))
    made = model([node("Sum", ["a", "b", "c"], ["y"])], inputs, ["y"])
    options = Options(max_batch_size=8, platforms=("cpu",))
    import_model(save(made, folder), folder / "models" / "m", options)
    (folder / "models/m/labels.txt").write_text("one\ntwo\nthree\n")
    return folder / "models"


async def infer(stub: Any) -> list[float]:
    data = np.array([[1, 2, 3]], np.float32)
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[data.tobytes()] * 3)
    for name in ("a", "b", "c"):
        request.inputs.add(name=name, datatype="FP32", shape=data.shape)
    answer = await stub.ModelInfer(request)
    return [float(one) for one in np.frombuffer(answer.raw_output_contents[0], np.float32)]


async def test_the_configuration_of_triton_stays_beside_an_import(
    serve: Serve, repository: Path
) -> None:
    (repository / "m/config.pbtxt").write_text(FROM_TRITON)
    with capture_logs() as lines:
        async with (
            serve(repository, load_model=("m",)) as server,
            grpc.aio.insecure_channel(server.url) as channel,
        ):
            stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            answer = await infer(stub)
            shown = (await stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
            # The returned configuration may be loaded.
            text = '{"platform": "%s", "backend": "%s"}' % (shown.platform, shown.backend)  # noqa: UP031
            again = pb.RepositoryModelLoadRequest(model_name="m")
            again.parameters["config"].string_param = text
            await stub.RepositoryModelLoad(again)
    named = next(line["fields"] for line in lines if "without effect" in line["event"])

    assert [3, 6, 9] == answer
    assert ("onnxruntime_onnx", "onnxruntime") == (shown.platform, shown.backend)
    assert {"platform (onnxruntime_onnx)", "backend (onnxruntime)", "optimization"} < set(named)


async def test_a_configuration_that_contradicts_the_artifact_fails_the_load(
    serve: Serve, repository: Path
) -> None:
    (repository / "m/config.pbtxt").unlink(missing_ok=True)
    async with (
        serve(repository, load_model=("m",)) as server,
        grpc.aio.insecure_channel(server.url) as channel,
    ):
        stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for text, problem in CONTRADICTING.items():
            (repository / "m/config.pbtxt").write_text(f"max_batch_size: 8 {text}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"))

            assert grpc.StatusCode.FAILED_PRECONDITION is caught.value.code()
            assert problem in (caught.value.details() or "")
            assert [3, 6, 9] == await infer(stub)
