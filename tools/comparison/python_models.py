"""Python models that xlaserve and Triton serve alike: the repository, and how to start Triton on
it.

`add_sub` reimplements the first example of Triton's python backend; `repeat` is a decoupled model
that sends each element of a tensor as a separate answer.
"""

import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np

from comparison.kit import Kit
from xlaserve.dialing.over_grpc import Client, infer_request
from xlaserve.grpc.protobuf.codec import WireCodec
from xlaserve.tensors import DATATYPES, Tensor, TensorSpec

ADD_SUB, REPEAT = "add_sub", "repeat"

_HEAD = """
name: "{name}"
backend: "python"
max_batch_size: 0
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""
_CONFIGS = {
    ADD_SUB: """
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
""",
    REPEAT: """
model_transaction_policy { decoupled: true }
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [
  { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "IDX" data_type: TYPE_UINT32 dims: [ 1 ] }
]
""",
}
_CODE = {
    ADD_SUB: '''
"""The sum and the difference of two tensors."""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            left = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            right = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            added = pb_utils.Tensor("OUTPUT0", left + right)
            subtracted = pb_utils.Tensor("OUTPUT1", left - right)
            responses.append(pb_utils.InferenceResponse(output_tensors=[added, subtracted]))
        return responses
''',
    REPEAT: '''
"""An answer for each element of a tensor."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            elements = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            for index, element in enumerate(elements):
                value = pb_utils.Tensor("OUT", np.array([element], np.int32))
                position = pb_utils.Tensor("IDX", np.array([index], np.uint32))
                sender.send(pb_utils.InferenceResponse(output_tensors=[value, position]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
''',
}


def make(root: Path) -> None:
    """Write the repository."""
    for name, code in _CODE.items():
        (root / name / "1").mkdir(parents=True, exist_ok=True)
        (root / name / "1" / "model.py").write_text(code.lstrip())
        (root / name / "config.pbtxt").write_text(_HEAD.format(name=name) + _CONFIGS[name])


def write_body(bodies: Path) -> None:
    """Write a request for `add_sub`, as h2load sends it, to the kit's directory of bodies."""
    message = WireCodec().encode_message(infer_request(ADD_SUB, "", _inputs()))
    bodies.mkdir(parents=True, exist_ok=True)
    (bodies / f"{ADD_SUB}.grpc").write_bytes(struct.pack(">BI", 0, len(message)) + message)
    (bodies / f"{ADD_SUB}.meta").write_text(json.dumps({"model": ADD_SUB}))


def _inputs() -> list[tuple[TensorSpec, Tensor]]:
    arrays = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    names = "INPUT0", "INPUT1"
    return [
        (TensorSpec(name, DATATYPES["FP32"], array.shape), array)
        for name, array in zip(names, arrays, strict=True)
    ]


async def ask(client: Client) -> None:
    """Return once `add_sub` has answered; exits if the answer is wrong.

    Raises an XlaserveError if the server does not answer.
    """
    inputs = _inputs()
    (_, left), (_, right) = inputs
    found = (await client.infer(ADD_SUB, "", inputs)).outputs
    for name, expected in (("OUTPUT0", left + right), ("OUTPUT1", left - right)):
        if not np.array_equal(expected, found[name]):
            sys.exit(f"{ADD_SUB} answers wrongly: expected {expected}, got {found[name]}")


def triton_command(kit: Kit, repository: Path, ports: tuple[int, int]) -> list[str]:
    """Return the command that starts the kit's Triton on a repository of Python models.

    Triton expects the stub in the backend's directory, so both are copied.
    """
    (packages,) = (kit.cache / "venv" / "triton" / "lib").glob("python3.*/site-packages")
    triton = packages / "pytriton" / "tritonserver"
    backends = repository.parent / "triton-backends"
    shutil.copytree(triton / "backends", backends, dirs_exist_ok=True)
    stub = shutil.copy(
        triton
        / "python_backend_stubs"
        / packages.parent.name.removeprefix("python")
        / "triton_python_backend_stub",
        backends / "python",
    )
    Path(stub).chmod(0o755)
    grpc, http = ports
    flags = {
        "model-repository": repository,
        "backend-directory": backends,
        "backend-config": f"python,shm-region-prefix-name=compared{grpc}",
        "grpc-address": "127.0.0.1",
        "grpc-port": grpc,
        "http-address": "127.0.0.1",
        "http-port": http,
        "allow-metrics": "false",
    }
    command = ["taskset", "-c", kit.server_cpu, str(triton / "bin" / "tritonserver")]
    return [
        *command,
        *(part for name, value in flags.items() for part in (f"--{name}", str(value))),
    ]


def triton_environment(kit: Kit) -> dict[str, str]:
    """Return Triton's environment: its stub finds Python through PATH and loads libpython."""
    environment = dict(kit.environment)
    home = kit.cache / "venv" / "triton"
    (packages,) = (home / "lib").glob("python3.*/site-packages")
    base = (home / "bin" / "python").resolve().parents[1]
    environment["PATH"] = f"{home / 'bin'}:{environment['PATH']}"
    environment["LD_LIBRARY_PATH"] = f"{base / 'lib'}:{packages / 'nvidia_pytriton.libs'}"
    environment["OMP_NUM_THREADS"] = "1"
    return environment
