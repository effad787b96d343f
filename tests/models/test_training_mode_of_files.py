"""`jax.export` files traced with layers in training mode: adopted, checked, served."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from flax import linen, nnx
from support.asking import client
from support.server import Serve

from xlaserve.artifact.bytecode import names_in
from xlaserve.artifact.training_layers import said_of_module
from xlaserve.authoring import adopting
from xlaserve.authoring.adopting import Options
from xlaserve.errors import InvalidModel
from xlaserve.offline.checkup import Checkup, Finding
from xlaserve.residence.repository.repository import Repository
from xlaserve.runtime import loaders
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import compile_plan

STATISTICS = "normalizes with batch statistics"
DROPS = "drops elements, the same in every request"
EVENT = "a layer of the model may be in training mode"


class Net(nnx.Module):
    """Two layers that both behave differently in training."""

    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(x))


def of_nnx(model: nnx.Module, *, trains: bool) -> Any:
    if not trains:
        model.eval()
    graph, state = nnx.split(model)

    def predict(x: Any) -> Any:
        copied: Any = nnx.merge(graph, state, copy=True)
        return copied(x)

    return predict


def of_linen(layer: linen.Module, variables: Any) -> Any:
    keys = {"dropout": jax.random.key(1)}
    return lambda x: layer.apply(variables, x, rngs=keys, mutable=["batch_stats"])[0]


def of_equinox(*, trains: bool) -> Any:
    layer = eqx.nn.Dropout(0.5, inference=not trains)
    return lambda x: layer(x, key=jax.random.key(0))


def linen_norm(*, trains: bool) -> Any:
    layer = linen.BatchNorm(use_running_average=not trains)
    return of_linen(layer, layer.init(jax.random.key(0), jnp.ones((2, 4), jnp.float32)))


def linen_dropout(*, trains: bool) -> Any:
    return of_linen(linen.Dropout(0.5, deterministic=not trains), {})


def own(*, trains: bool) -> Any:
    """Dropout written by a user, without a known name."""
    if not trains:
        return lambda x: x * 2
    return lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)


def layers(x: Any) -> Any:
    """Operations that mix rows or normalise, without training mode."""
    norm: Any = linen.LayerNorm(use_scale=False, use_bias=False)
    return jax.nn.softmax(x, 0) + norm.apply({}, x) - x.mean(0)


KINDS: Mapping[str, tuple[Any, str]] = {
    "nnx": (
        lambda trains: of_nnx(Net(), trains=trains),
        f"flax.nnx.BatchNorm {STATISTICS}; export it again: call model.eval() first",
    ),
    "nnx-dropout": (
        lambda trains: of_nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), trains=trains),
        f"flax.nnx.Dropout {DROPS}; export it again: call model.eval() first",
    ),
    "linen-norm": (
        lambda trains: linen_norm(trains=trains),
        f"flax.linen.BatchNorm {STATISTICS}; export it again: apply it in inference mode: "
        "train=False, or the argument that sets use_running_average=True",
    ),
    "linen-dropout": (
        lambda trains: linen_dropout(trains=trains),
        f"flax.linen.Dropout {DROPS}; export it again: apply it in inference mode: train=False, "
        "or the argument that sets deterministic=True",
    ),
    "equinox": (
        lambda trains: of_equinox(trains=trains),
        f"equinox.nn.Dropout {DROPS}; export it again: export equinox.nn.inference_mode(model)",
    ),
    "own": (
        lambda trains: own(trains=trains),
        "jax.random.bernoulli draws the same numbers in every request, as dropout does; export it"
        " again in inference mode, or with a seed among its inputs",
    ),
}


def written(root: Path, fn: Any, *more: Any) -> Path:
    """Write a file as a user of plain JAX would, as a model in a repository."""
    (rows,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((rows, 4), jnp.float32)
    path = root / "m" / "1" / "model.jaxexp"
    path.parent.mkdir(parents=True)
    # JAX's default settings.
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        path.write_bytes(jax.export.export(jax.jit(fn), platforms=["cpu"])(x, *more).serialize())
    return path


def notes_of(root: Path) -> tuple[Finding, list[str]]:
    """Return the finding of `repo check`, and its notes about training mode."""
    repository = Repository(root, max_models=1, max_config_bytes=1000)
    (report,) = Checkup(
        repository, loaders.load, lambda source, _: LoadContext(source.name, "1", source.config)
    ).run()
    return report.finding, [note for note in report.notes if "training mode" in note]


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_says_what_looks_like_training(kind: str, tmp_path: Path) -> None:
    make, told = KINDS[kind]
    written(tmp_path, make(True))

    assert (Finding.NOTES, [f"it looks like training mode: {told}"]) == notes_of(tmp_path)


def test_a_check_says_nothing_of_inference(tmp_path: Path) -> None:
    make, _ = KINDS["nnx"]
    written(tmp_path, make(False))

    assert (Finding.WORKS, []) == notes_of(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_in_inference_looks_like_training(kind: str, tmp_path: Path) -> None:
    make, _ = KINDS[kind]

    assert "" == said_of_module(module_of(written(tmp_path, make(False))), takes_integers=False)


def test_layers_without_modes_are_in_no_training(tmp_path: Path) -> None:
    path = written(tmp_path, layers)

    assert "" == said_of_module(module_of(path), takes_integers=False)


@pytest.mark.parametrize("has_seed", [False, True])
def test_what_draws_by_a_seed_of_its_request_is_meant(tmp_path: Path, *, has_seed: bool) -> None:
    def noisy(x: Any, seed: Any = 0) -> Any:
        return x * jax.random.bernoulli(jax.random.key(seed), 0.5, (4,))

    (path,) = [written(tmp_path, noisy, *[jax.ShapeDtypeStruct((), jnp.int32)] * has_seed)]
    said = said_of_module(module_of(path), takes_integers=has_seed)

    assert has_seed is not ("looks like training mode" in said)


def decode_bernoulli(x: Any) -> Any:
    return x * 2


def drawn_twice(x: Any) -> Any:
    """Draw twice, with two shapes, so that the module has two drawing functions."""
    key = jax.random.key(0)
    return x * jax.random.bernoulli(key, 0.5, (1, 4)) * jax.random.bernoulli(key, 0.5, (4,))


@pytest.mark.parametrize(("fn", "draws"), [(decode_bernoulli, False), (drawn_twice, True)])
def test_a_function_that_is_named_like_one_that_draws_draws_nothing(
    tmp_path: Path, fn: Any, *, draws: bool
) -> None:
    module = module_of(written(tmp_path, jax.jit(fn) if draws else lambda x: jax.jit(fn)(x) + 1))

    assert b"_bernoulli" in module
    assert draws is ("draws the same numbers" in said_of_module(module, takes_integers=False))


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_found_without_a_look_at_the_weights(kind: str, tmp_path: Path) -> None:
    """Names are in their own section of the module, apart from the constants."""
    make, told = KINDS[kind]
    model, weights = make(True), np.arange(1 << 18, dtype=np.float32)
    module = module_of(written(tmp_path, lambda x: model(x) + jnp.sum(weights)))
    names = names_in(module)

    assert len(module) > weights.nbytes
    assert len(names) < weights.nbytes / 8
    assert f"it looks like training mode: {told}" == said_of_module(module, takes_integers=False)
    assert b"add_v1" in names


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 20, 40, 400])
def test_what_is_no_module_is_searched_whole(tmp_path: Path, cut: int) -> None:
    whole = module_of(written(tmp_path, decode_bernoulli))

    assert [whole[:cut], whole[1:], b"x" * cut] == [
        names_in(one) for one in (whole[:cut], whole[1:], b"x" * cut)
    ]


async def test_models_of_one_computation_are_searched_once(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []

    def counted(module: bytes, **options: Any) -> str:
        searched.append(len(module))
        return said_of_module(module, **options)

    monkeypatch.setattr(compile_plan, "said_of_module", counted)
    path = written(tmp_path, decode_bernoulli)
    shutil.copytree(path.parent.parent, tmp_path / "n")
    async with serve(tmp_path, load_model=("m",)) as server, client(server) as asked:
        await asked.grpc.load_model("n")
        ready = [await asked.grpc.is_model_ready(name) for name in "mn"]

    assert [True] * 2 == ready
    assert [len(module_of(path))] == searched


def module_of(path: Path) -> bytes:
    return bytes(jax.export.deserialize(bytearray(path.read_bytes())).mlir_module_serialized)


async def test_the_log_of_a_load_says_it_too(serve: Serve, tmp_path: Path) -> None:
    make, told = KINDS["nnx"]
    written(tmp_path, make(True))
    with structlog.testing.capture_logs() as logged:
        async with serve(tmp_path, load_model=("m",)):
            pass

    reasons = [line["reason"] for line in logged if line["event"] == EVENT]
    assert [f"it looks like training mode: {told}"] == reasons


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "own"])
def test_it_is_not_adopted(kind: str, tmp_path: Path) -> None:
    make, told = KINDS[kind]
    path = written(tmp_path, make(True))
    with pytest.raises(InvalidModel) as raised:
        adopting.read(path, Options())

    begin, _, _ = told.partition("; export it again")
    assert f"model.jaxexp looks like training mode: {begin}; " in str(raised.value)
    assert "and write it again, or adopt it unchanged with --training-mode" in str(raised.value)
    adopting.read(path, Options(training_mode=True))
