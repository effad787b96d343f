"""A model with layers in training mode is refused, with the framework's remedy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import xlaserve
from xlaserve.artifact.training_layers import LAYERS
from xlaserve.errors import InvalidModel

INPUTS = {"x": ("FP32", [-1, 4])}
STATISTICS = "normalizes with batch statistics"
DROPS = "drops elements, the same in every request"


class Normed(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.norm(x)


class Dropped(nnx.Module):
    def __init__(self, rate: float = 0.5) -> None:
        self.dropout = nnx.Dropout(rate, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.dropout(x)


class Layers(linen.Module):
    kind: str

    @linen.compact
    def __call__(self, x: Any, train: bool) -> Any:
        if self.kind == "norm":
            return linen.BatchNorm(use_running_average=not train)(x)
        return linen.Dropout(0.5, deterministic=not train)(x)


Made = tuple[Callable[..., Any], Any]
"""A function and its parameters."""


def of_nnx(make: Callable[[], Any]) -> Callable[[bool], Made]:
    def made(trains: bool) -> Made:
        model = make()
        if not trains:
            model.eval()
        graph, state = nnx.split(model)
        return lambda p, x: {"y": nnx.merge(graph, p)(x)}, state

    return made


def of_linen(kind: str) -> Callable[[bool], Made]:
    def made(trains: bool) -> Made:
        model = Layers(kind)
        variables = model.init(jax.random.key(0), jnp.ones((2, 4), jnp.float32), train=False)

        def predict(p: Any, x: Any) -> Any:
            keys = {"dropout": jax.random.key(1)}
            mutable = ["batch_stats"]
            y, _ = model.apply(p, x, train=trains, rngs=keys, mutable=mutable)
            return {"y": y}

        return predict, variables

    return made


def of_equinox(trains: bool) -> Made:
    layer = eqx.nn.Dropout(0.5)
    model = layer if trains else eqx.nn.inference_mode(layer)
    return lambda p, x: {"y": model(x, key=jax.random.key(0))}, {}


KINDS: Mapping[str, tuple[Callable[[bool], Made], str]] = {
    "flax.nnx.BatchNorm": (of_nnx(Normed), f"{STATISTICS}; call model.eval() first"),
    "flax.nnx.Dropout": (of_nnx(Dropped), f"{DROPS}; call model.eval() first"),
    "flax.linen.BatchNorm": (of_linen("norm"), f"{STATISTICS}; apply it in inference mode"),
    "flax.linen.Dropout": (of_linen("dropout"), f"{DROPS}; apply it in inference mode"),
    "equinox.nn.Dropout": (of_equinox, f"{DROPS}; export equinox.nn.inference_mode(model)"),
}


def export(made: Made, path: Path, **options: Any) -> Path:
    fn, params = made
    return xlaserve.export_model(fn, params, INPUTS, path / "m" / "1", **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_training_mode_is_refused(kind: str, tmp_path: Path) -> None:
    make, told = KINDS[kind]
    with pytest.raises(InvalidModel) as raised:
        export(make(True), tmp_path)

    assert f"looks like training mode: {kind} {told}" in str(raised.value)
    assert "training_mode=True" in str(raised.value)
    assert not (tmp_path / "m" / "1").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_layer_in_inference_is_exported(kind: str, tmp_path: Path) -> None:
    make, _ = KINDS[kind]

    assert (export(make(False), tmp_path) / "model.json").is_file()


def test_it_is_exported_where_that_is_wanted(tmp_path: Path) -> None:
    make, _ = KINDS["flax.nnx.BatchNorm"]

    path = export(make(True), tmp_path, training_mode=True)
    assert (path / "model.json").is_file()


def test_dropout_that_drops_nothing_trains_nothing(tmp_path: Path) -> None:
    make = of_nnx(lambda: Dropped(0.0))

    assert (export(make(True), tmp_path) / "model.json").is_file()


def test_the_table_names_code_that_is_there() -> None:
    """For the installed frameworks: a renamed layer must not go unnoticed."""
    for module, name in LAYERS:
        found = pytest.importorskip(module) if module.startswith(("flax", "equinox")) else None
        if found is not None:
            owner, method = name.split(".")
            code = getattr(getattr(found, owner), method)
            while hasattr(code, "__wrapped__"):
                code = code.__wrapped__
            layer = LAYERS[module, name]
            assert layer.local in code.__code__.co_varnames
