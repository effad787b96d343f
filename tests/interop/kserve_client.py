"""Calls a server with KServe's own REST client, and prints the results as JSON.

Runs as a separate program: importing kserve emits many warnings and changes the process's logging.
"""

import asyncio
import json
import sys
from typing import Any

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


def inputs(*, binary: bool) -> list[Any]:
    """Return the input tensors of the model `simple`."""
    made = []
    for name, value in (("INPUT0", 7), ("INPUT1", 2)):
        tensor = InferInput(name, [1, 16], "INT32")
        tensor.set_data_from_numpy(np.full((1, 16), value, np.int32), binary_data=binary)
        made.append(tensor)
    return made


async def main(url: str) -> dict[str, Any]:
    """Call every method of the client."""
    client = InferenceRESTClient(RESTConfig(protocol="v2", verbose=False))
    found: dict[str, Any] = {
        "live": await client.is_server_live(url),
        "ready": await client.is_server_ready(url),
        "model": await client.is_model_ready(url, "simple"),
        "unknown": await client.is_model_ready(url, "nope"),
    }
    for binary in (False, True):
        request = InferRequest("simple", inputs(binary=binary), request_id="1")
        answer: Any = await client.infer(url, request, model_name="simple")
        found[f"sums, binary {binary}"] = [o.as_numpy().ravel().tolist() for o in answer.outputs]
    await client.close()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
