"""Plain `jax.export` files and nested pytrees in a whole server."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import json
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as triton_http
from support.server import Serve

import xlaserve

W = np.arange(12, dtype=np.float32).reshape(4, 3)


def _put_plain(directory: Path) -> None:
    """Write only a `jax.export` file of a function of a dict."""
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 4), np.float32)
    exported = jax.export.export(jax.jit(lambda d: [d["x"]["a"] @ W]))({"x": {"a": x}})
    directory.mkdir(parents=True)
    (directory / "anything.jaxexp").write_bytes(exported.serialize())
    (directory / "names.json").write_text(json.dumps({"outputs": ["scores"]}))


async def _ask(client: Any, module: Any, model: str, **arrays: Any) -> Any:
    given = []
    for name, array in arrays.items():
        given.append(module.InferInput(name.replace("_", "."), array.shape, "FP32"))
        given[-1].set_data_from_numpy(array)
    return await client.infer(model, given)


async def test_arrays_of_trees_are_tensors_by_the_names_of_their_paths(
    serve: Serve, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    _put_plain(root / "plain" / "1")
    xlaserve.export_model(
        lambda p, tree: {"out": {"sum": tree["l"][0] + tree["l"][1], "d": (tree["m"] * 2,)}},
        None,
        {"t": {"l": [("FP32", [-1, 2]), ("FP32", [-1, 2])], "m": ("FP32", [-1])}},
        root / "nested" / "1",
    )
    one, two, m = np.ones((3, 2), np.float32), np.eye(3, 2, dtype=np.float32), np.arange(3.0)
    async with (
        serve(root, load_model=("plain", "nested"), http_endpoint="port:0") as server,
        triton.InferenceServerClient(server.url) as grpc,
        triton_http.InferenceServerClient(str(server.http)) as http,
    ):
        metadata: Any = await grpc.get_model_metadata("nested", as_json=True)
        for client, module in ((grpc, triton), (http, triton_http)):
            x = np.ones((2, 4), np.float32)
            plain = await _ask(client, module, "plain", x_a=x)
            nested = await _ask(
                client, module, "nested", t_l_0=one, t_l_1=two, t_m=m.astype(np.float32)
            )
            np.testing.assert_allclose(x @ W, plain.as_numpy("scores"), rtol=1e-5)
            np.testing.assert_array_equal(one + two, nested.as_numpy("out.sum"))
            np.testing.assert_array_equal(m * 2, nested.as_numpy("out.d.0"))

    assert ["t.l.0", "t.l.1", "t.m"] == [tensor["name"] for tensor in metadata["inputs"]]
    assert {"out.sum", "out.d.0"} == {tensor["name"] for tensor in metadata["outputs"]}
