"""Predicted memory of a load: at least what it reserves, and at most twice as much."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.architectures import ARCHITECTURES

from xlaserve.artifact import manifest, sizes
from xlaserve.authoring.export import export_model
from xlaserve.model_config.config import ModelConfig
from xlaserve.offline.targets.child import Child
from xlaserve.offline.targets.jobs import Job
from xlaserve.runtime import loaders
from xlaserve.runtime.devices.placement import Devices
from xlaserve.runtime.load_context import LoadContext

EXAMPLES = ("digits", "identity", "mlp", "simple")
NETWORKS = (
    pytest.param("bert", 8),
    *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("bert", "lstm", "resnet50")),
)
MANY_PROGRAMS = {"batch_sizes": ",".join(map(str, range(1, 33)))}


@pytest.fixture(scope="module")
def compiler() -> Child:
    return Child()


@pytest.fixture(scope="module", autouse=True)
def _estimating() -> None:
    loaders.begin_estimating()


def _check(compiler: Child, path: Path, parameters: Mapping[str, str]) -> None:
    """Compare the sizes for a mesh, whose loads compile every batch size."""
    config = ModelConfig(parameters=dict(parameters))
    predicted = loaders.predict_size(path, config)["cpu:0"]
    done = compiler.compiled(Job("m", str(path), "cpu", parameters=dict(parameters)))
    assert done.problem is None
    assert done.reserved is not None
    booked = done.reserved.per_device["cpu:0"]
    print(f"{path.parent.name}: {predicted} predicted, {booked} booked, {predicted / booked:.2f}")

    assert booked <= predicted <= 2 * booked


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_told_what_they_book(compiler: Child, example_models: Path, name: str) -> None:
    most = {"batch_sizes": "1,8"} if name == "simple" else {"batch_sizes": "1,64"}
    _check(compiler, example_models / name / "1", most)


@pytest.mark.parametrize(("name", "scale"), NETWORKS)
def test_networks_are_told_what_they_book(
    compiler: Child, tmp_path: Path, name: str, scale: int
) -> None:
    """Widths and depths are reduced, so that parameters do not dominate the memory."""
    path = ARCHITECTURES[name](scale).write(tmp_path / name / "1", on_notice=lambda notice: None)
    most = manifest.read(path).max_batch_size
    _check(compiler, path, {"batch_sizes": str(most)})


def _wide(params: None, x: jax.Array) -> jax.Array:
    """Take much more memory for intermediate results than for inputs and outputs."""
    return jnp.sort(x[:, :, None] * x[:, None, :], axis=1)[:, 0, :4]


def _looped(params: None, x: jax.Array) -> jax.Array:
    def step(state: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return jnp.tanh(state) + 1, state

    last, seen = jax.lax.scan(step, x, None, length=64)
    return last + jnp.flip(seen, 0)[3]


def _branched(params: None, x: jax.Array) -> jax.Array:
    wide = jnp.repeat(x, 64, axis=1)
    chosen: jax.Array = jax.lax.cond(x.sum() > 0, lambda y: jnp.sort(y, 1), lambda y: y, wide)
    return chosen[:, :3]


def _large_constant(params: None, x: jax.Array) -> jax.Array:
    return x @ jnp.asarray(np.random.default_rng(1).normal(size=(1024, 1024)), jnp.float32)


@pytest.mark.parametrize("function", [_wide, _looped, _branched, _large_constant])
def test_what_is_large_inside_is_told(
    compiler: Child, tmp_path: Path, function: Callable[..., Any]
) -> None:
    path = tmp_path / function.__name__ / "1"
    export_model(function, None, {"x": ("FP32", [8, 1024])}, path, outputs=["y"])
    _check(compiler, path, {})


def test_a_load_that_leaves_most_for_later_is_told_for_what_it_does_at_once(
    example_models: Path,
) -> None:
    """The load compiles two of twelve programs; the prediction for a mesh includes all."""
    path = example_models / "digits/1"
    at_once = loaders.predict_size(path, in_background=True)["cpu:0"]
    context = LoadContext("digits", "1", ModelConfig(), background_compile=True)
    model = loaders.load(path, context)
    booked = model.info.memory.on_devices("cpu:0")["cpu:0"]
    model.close()

    assert booked <= at_once <= 2 * booked
    assert 10 * sizes.EXECUTABLE_BYTES == loaders.predict_size(path)["cpu:0"] - at_once


@pytest.mark.parametrize("parameters", [{"batch_sizes": "1,64"}, MANY_PROGRAMS])
def test_programs_are_those_of_the_configuration(
    example_models: Path, parameters: dict[str, str]
) -> None:
    path = example_models / "mlp/1"
    every, asked = (
        loaders.predict_size(path, ModelConfig(parameters=one))["cpu:0"] for one in ({}, parameters)
    )
    more = len({*parameters["batch_sizes"].split(","), "64"}) - 12

    assert more * sizes.EXECUTABLE_BYTES == asked - every


def test_programs_of_a_gpu_are_smaller_than_those_of_the_host(example_models: Path) -> None:
    path = example_models / "simple/1"
    on_host, on_gpu = (
        next(iter(loaders.predict_size(path, devices=Devices(platform, 1)).values()))
        for platform in ("cpu", "cuda")
    )

    assert on_gpu < on_host / 4


def test_an_estimate_that_takes_long_is_not_waited_for(
    example_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters and programs are included in any case."""
    path = example_models / "mlp/1"
    whole = loaders.predict_size(path)["cpu:0"]
    let_go = threading.Event()
    monkeypatch.setattr(sizes, "_estimated", lambda asked: let_go.wait(60))
    hasty = loaders.predict_size(path, patience_seconds=0.01)["cpu:0"]
    let_go.set()

    assert manifest.read(path).parameters_bytes + 12 * sizes.EXECUTABLE_BYTES < hasty < whole
