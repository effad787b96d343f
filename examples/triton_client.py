"""The unmodified tritonclient against `xlaserve serve examples/models`."""

import sys

import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8001")
a, b = np.arange(16, dtype=np.int32)[None], np.ones((1, 16), np.int32)
inputs = [triton.InferInput(name, a.shape, "INT32") for name in ("INPUT0", "INPUT1")]
inputs[0].set_data_from_numpy(a)
inputs[1].set_data_from_numpy(b)
result = client.infer("simple", inputs)
print("sum       ", result.as_numpy("OUTPUT0")[0])
print("difference", result.as_numpy("OUTPUT1")[0])
