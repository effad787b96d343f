"""Models for tests: exported once, loaded as each test wants, and closed afterwards."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest
from support.compilations import noted_compilations

from xlaserve.authoring.export import export_model
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel, Value
from xlaserve.tensors import Tensor

Load: TypeAlias = Callable[..., LoadedModel]
"""`load(directory, config)`: loads on the CPU, and closes the model after the test."""

Run: TypeAlias = Callable[[LoadedModel, Mapping[str, Value]], dict[str, Tensor]]

WEIGHTS = {
    "w": np.arange(4 * 300, dtype=np.float32).reshape(4, 300) / 1000,
    "b": np.linspace(-1, 1, 300, dtype=np.float32),
}


def affine(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A function with one parameter passed by itself and one that is packed."""
    return x @ params["w"] + params["b"][None, :]


@pytest.fixture(autouse=True, scope="session")
def _jax_started() -> None:
    jax_runtime.start("cpu")


@pytest.fixture(scope="session")
def affine_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `x` FP32[-1,4] -> `y` FP32[-1,300], max_batch_size 6. Not to be written to."""
    path = tmp_path_factory.mktemp("models") / "affine" / "1"
    inputs = {"x": ("FP32", [-1, 4])}
    return export_model(affine, WEIGHTS, inputs, path, outputs=["y"], max_batch_size=6)


@pytest.fixture(scope="session")
def affine_model(affine_directory: Path) -> Iterator[LoadedModel]:
    """Return the affine model, loaded once for all tests that only execute it."""
    model = loaders.load(affine_directory, LoadContext("affine", "1", ModelConfig()))
    yield model
    model.close()


@pytest.fixture
def load() -> Iterator[Load]:
    """Load a directory as model `m`, version 1.

    Without a configuration batches are not split, because the fastest sizes depend on the machine.
    """
    loaded: list[LoadedModel] = []
    whole = ModelConfig(parameters={"split_batches": "false"})

    def load_model(directory: Path, config: ModelConfig | None = None, **more: Any) -> LoadedModel:
        context = LoadContext("m", "1", config or whole, **more)
        loaded.append(loaders.load(directory, context))
        return loaded[-1]

    yield load_model
    for model in loaded:
        model.close()


@pytest.fixture
def run() -> Run:
    """Execute with outputs on the host."""

    def execute(model: LoadedModel, inputs: Mapping[str, Value]) -> dict[str, Tensor]:
        outputs = model.execute(inputs)
        return {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}

    return execute


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Collect the names of the functions that XLA compiles during a test; may be cleared."""
    with noted_compilations() as names:
        yield names
