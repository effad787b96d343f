"""Write the models of tests/data/old_models with the running JAX, for tests with later versions.

    uv venv --python 3.11 old
    uv pip install --python old/bin/python jax==0.6.2 flatbuffers ml_dtypes msgspec
    uv pip install --python old/bin/python --no-deps .
    old/bin/python tools/make_old_models.py

Run once per version of JAX; existing files are not rewritten. Each model is stored with inputs and
the answers of this JAX. `plain.jaxexp` is the MLP as written by `jax.export` alone.
"""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.experimental
import jax.export
import jax.numpy as jnp
import numpy as np

DATA = Path(__file__).parent.parent / "tests" / "data" / "old_models"
ANSWERS = "answers.safetensors"
PLAIN = "plain.jaxexp"
ROWS = 2


@dataclass(frozen=True)
class Model:
    """A function with its parameters and inputs."""

    fn: Callable[..., dict[str, jax.Array]]
    params: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]


def mlp(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """Use a softmax, and parameters both as arguments and as constants."""
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"][None])
    return {"y": jax.nn.softmax(hidden @ params["w2"])}


def conv(params: dict[str, jax.Array], image: jax.Array) -> dict[str, jax.Array]:
    """Use a convolution and a max pooling."""
    layout = ("NHWC", "HWIO", "NHWC")
    found = jax.lax.conv_general_dilated(
        image, params["kernel"], (1, 1), "SAME", dimension_numbers=layout
    )
    window = (1, 2, 2, 1)
    return {"found": jax.lax.reduce_window(found, -jnp.inf, jax.lax.max, window, window, "VALID")}


def count(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """Use 64-bit integers, and more than one result."""
    return {"sum": jnp.cumsum(x, axis=1) + params["start"], "largest": jnp.argmax(x, axis=1)}


def solve(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
    """Use functions of LAPACK."""
    squares = x @ jnp.swapaxes(x, 1, 2) + params["diagonal"][None]
    return {"root": jnp.linalg.cholesky(squares), "values": jnp.linalg.eigvalsh(squares)}


def models() -> dict[str, Model]:
    """Return the models by name; they must never change."""
    random = np.random.RandomState(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    start = np.full((1, 1), 1 << 40)
    return {
        "mlp": Model(
            mlp, {"w1": normal(8, 40), "b1": normal(40), "w2": normal(40, 3)}, {"x": normal(2, 8)}
        ),
        "conv": Model(conv, {"kernel": normal(3, 3, 1, 2)}, {"image": normal(2, 4, 4, 1)}),
        "count": Model(count, {"start": start}, {"x": random.randint(-9, 9, (2, 5))}),
        "solve": Model(solve, {"diagonal": np.eye(3, dtype=np.float32)}, {"x": normal(2, 3, 3)}),
    }


def write(name: str, model: Model, directory: Path) -> None:
    """Export one model, and write its answers next to it."""
    from xlaserve.artifact import weights
    from xlaserve.authoring.export import export_model
    from xlaserve.tensors import TensorSpec, datatype_of

    specs = []
    for key, value in model.inputs.items():
        datatype = datatype_of(value.dtype)
        assert datatype is not None
        specs.append(TensorSpec(key, datatype, (-1, *value.shape[1:])))
    path = export_model(
        model.fn,
        model.params,
        specs,
        directory / name / "1",
        max_batch_size=ROWS,
        exported_at=datetime.now(UTC),
    )
    answers = jax.jit(model.fn)(model.params, *model.inputs.values())
    tensors = {f"inputs/{key}": value for key, value in model.inputs.items()}
    tensors |= {f"outputs/{key}": np.asarray(value) for key, value in answers.items()}
    weights.write(directory / name / ANSWERS, tensors)
    print(f"{name}: {sum(file.stat().st_size for file in path.iterdir())} bytes")


def write_plain(model: Model, path: Path) -> None:
    """Export a model by JAX alone, with its parameters as constants."""
    batch = jax.export.symbolic_shape("b")
    arguments = {
        key: jax.ShapeDtypeStruct((*batch, *value.shape[1:]), value.dtype)
        for key, value in model.inputs.items()
    }

    def plain(inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return model.fn(jax.tree.map(jnp.asarray, model.params), *inputs.values())

    exported = jax.export.export(jax.jit(plain), platforms=("cpu", "cuda"))(arguments)
    path.write_bytes(exported.serialize())
    print(f"{path.name}: {path.stat().st_size} bytes")


def main() -> None:
    """Write all models with the running JAX."""
    directory = DATA / jax.__version__
    if directory.exists():
        sys.exit(f"{directory} is there already, and not to be written again")
    if not hasattr(jax, "enable_x64"):
        # Its location before jax 0.8.
        setattr(jax, "enable_x64", getattr(jax.experimental, "enable_x64"))  # noqa: B010, B009
    jax.config.update("jax_enable_x64", True)
    for name, model in models().items():
        write(name, model, directory)
    write_plain(models()["mlp"], directory / PLAIN)


if __name__ == "__main__":
    main()
