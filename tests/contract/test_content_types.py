"""A Python model that reads and writes by content type, with the stock clients."""

from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from support.server import Serve

CODE = """
from xlaserve import PythonModel, content_types


class Shouts(PythonModel):
    inputs = {"text": ("BYTES", [1])}
    outputs = {"shout": ("BYTES", [1])}
    max_batch_size = 8

    def infer(self, inputs, request):
        kind = request.parameters["content_type"]
        words = content_types.decode(inputs["text"], kind)
        return {"shout": content_types.encode([word.upper() for word in words], kind)}
"""


async def test_a_model_obeys_the_content_type_of_the_request(serve: Serve, tmp_path: Path) -> None:
    version = tmp_path / "models" / "shouts" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(CODE)
    asked = {"str": ([b"cat", b"dog"], [b"CAT", b"DOG"]), "base64": ([b"YQ=="], [b"QQ=="])}
    found = []
    async with (
        serve(
            tmp_path / "models",
            load_model=("shouts",),
            http_endpoint="port:0",
            allow_python_models=True,
        ) as server,
        triton.InferenceServerClient(server.url) as grpc,
        triton_http.InferenceServerClient(str(server.http)) as http,
    ):
        for client, module in ((grpc, triton), (http, triton_http)):
            for kind, (given, _) in asked.items():
                data = np.array(given, np.object_).reshape(-1, 1)
                tensor: Any = module.InferInput("text", data.shape, "BYTES")
                tensor.set_data_from_numpy(data)
                answer: Any = await client.infer(
                    "shouts", [tensor], parameters={"content_type": kind}
                )
                found.append(answer.as_numpy("shout")[:, 0].tolist())

    assert [expected for _, expected in asked.values()] * 2 == found
