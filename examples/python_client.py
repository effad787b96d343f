"""Query the models of examples/python_models with Triton's client.

xlaserve serve examples/python_models --allow-python-models
python examples/python_client.py [HOST:PORT]
"""

import sys

import numpy as np
import tritonclient.http as triton

with triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "localhost:8000") as client:
    texts = np.array([[b"The film was great"], [b"Poor film"]], np.object_)
    text = triton.InferInput("text", texts.shape, "BYTES")
    text.set_data_from_numpy(texts)
    print(client.infer("sentiment", [text]).as_numpy("score").tolist())
