"""Serve a Triton repository unchanged, and query it with Triton's own client; see README.md."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper

sys.path.append(str(Path(__file__).resolve().parents[1]))

from serving import served, stay

WEIGHT = np.array([[1, 0], [0, 2], [3, 3]], np.float32)
LINEAR = """
name: "linear"
backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
dynamic_batching { max_queue_delay_microseconds: 100 }
"""
CLIP = """
name: "clip"
backend: "python"
max_batch_size: 8
input [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "z" data_type: TYPE_FP32 dims: [ 2 ] } ]
"""
CODE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            y = pb_utils.get_input_tensor_by_name(request, "y").as_numpy()
            tensor = pb_utils.Tensor("z", y.clip(0, 5))
            answers.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return answers
"""
BOTH = """
name: "both"
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "z" data_type: TYPE_FP32 dims: [ 2 ] } ]
ensemble_scheduling {
  step [
    { model_name: "linear" model_version: -1
      input_map { key: "x" value: "x" } output_map { key: "y" value: "middle" } },
    { model_name: "clip" model_version: -1
      input_map { key: "y" value: "middle" } output_map { key: "z" value: "z" } }
  ]
}
"""


def write(repository: Path) -> None:
    """Write an ONNX model, a Python model and an ensemble in Triton's layout."""
    for name, config in (("linear", LINEAR), ("clip", CLIP), ("both", BOTH)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    (repository / "clip/1/model.py").write_text(CODE)
    rows = ("N", 3), ("N", 2)
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in zip("xy", rows, strict=True)
    )
    multiplied = helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = helper.make_graph(
        [multiplied], "linear", [x], [y], [numpy_helper.from_array(WEIGHT, "w")]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, str(repository / "linear/1/model.onnx"))


def main() -> None:
    """Check the repository, serve it with Triton's flags, and compare the answers."""
    with TemporaryDirectory() as folder:
        repository = Path(folder, "models")
        write(repository)
        check = ["repo", "check", str(repository), "--allow-python-models"]
        subprocess.run([sys.executable, "-m", "xlaserve.cli", *check], check=True)
        flags = (f"--model-repository={repository}", "--strict-readiness=true", "--log-verbose=0")
        with served(None, *flags, "--allow-python-models") as server:
            x = np.array([[1, 2, 3], [-4, 0, 1]], np.float32)
            tensor = triton.InferInput("x", list(x.shape), "FP32")
            tensor.set_data_from_numpy(x)
            with triton.InferenceServerClient(server.grpc) as client:
                y = client.infer("linear", [tensor]).as_numpy("y")
                z = client.infer("both", [tensor]).as_numpy("z")
            print("linear", y.tolist())
            print("both  ", z.tolist())
            stay(server)
            if not (np.allclose(x @ WEIGHT, y) and np.allclose((x @ WEIGHT).clip(0, 5), z)):
                sys.exit("that is not what was expected")


if __name__ == "__main__":
    main()
