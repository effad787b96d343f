"""Computations in StableHLO, as artifacts of the JAX that runs and back."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import dataclasses
from unittest.mock import Mock

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import Exported

from xlaserve.artifact import artifact, computation
from xlaserve.artifact.computation import (
    STABLEHLO_VERSIONS,
    Abstract,
    is_same,
    lasting,
    newest_stablehlo,
    of_artifact,
    stablehlo_version,
    to_artifact,
)
from xlaserve.errors import InvalidModel

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def exported() -> Exported:
    """One of an argument that is used and another that is not."""
    x = jax.ShapeDtypeStruct((3, 4), np.float32)
    y = jax.ShapeDtypeStruct((4,), np.float32)
    return jax.export.export(jax.jit(lambda x, y: {"y": jnp.tanh(x) * 2}))(x, y)


def test_artifact_comes_back_as_it_was(exported: Exported) -> None:
    kept = lasting(exported)
    back = to_artifact(kept)

    assert kept == of_artifact(back)
    assert (1,) == kept.unused
    assert np.array_equal(jax.jit(exported.call)(X, X[0])["y"], jax.jit(back.call)(X, X[0])["y"])


def test_module_is_written_in_the_oldest_stablehlo(exported: Exported) -> None:
    module = computation.portable(exported.mlir_module_serialized)

    assert STABLEHLO_VERSIONS[0] == stablehlo_version(module)
    assert is_same(exported.mlir_module_serialized, module)


def test_module_that_older_stablehlo_cannot_say_stays_as_it_is(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "READ_FROM", {"0.1.0": "0.1.0"})

    module = exported.mlir_module_serialized
    assert module == computation.portable(module)


def test_other_computation_is_not_the_same(exported: Exported) -> None:
    x = jax.ShapeDtypeStruct((2,), np.float32)
    other = jax.export.export(jax.jit(jnp.sin))(x)

    assert not is_same(exported.mlir_module_serialized, other.mlir_module_serialized)


def test_computations_that_look_alike_are_traced_once(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And have nothing in common but that: each has its own module."""
    x = jax.ShapeDtypeStruct((3, 4), np.float32)
    y = jax.ShapeDtypeStruct((4,), np.float32)
    like = jax.export.export(jax.jit(lambda x, y: {"y": x - 5}))(x, y)
    unlike = jax.export.export(jax.jit(lambda x, y: {"z": x - 5}))(x, y)
    kept = [lasting(one) for one in (exported, like, unlike)]
    to_artifact(kept[0])
    export = Mock(wraps=jax.export.export)
    monkeypatch.setattr(jax.export, "export", export)
    artifacts = [to_artifact(one) for one in (*kept, kept[2])]
    answers = [jax.jit(one.call)(X, X[0]) for one in artifacts[:3]]

    assert 1 == export.call_count
    assert [["y"], ["y"], ["z"]] == [list(answer) for answer in answers]
    assert np.allclose(np.tanh(X) * 2, answers[0]["y"])
    assert np.array_equal(X - 5, answers[1]["y"])
    assert np.array_equal(X - 5, answers[2]["z"])
    assert artifacts[2] is not artifacts[3]


def test_version_of_something_else_is_unknown() -> None:
    assert "" == stablehlo_version(b"ML\xefR\x0dMLIR22\0")
    assert newest_stablehlo().count(".") == 2


def test_artifact_holds_on_to_nothing_that_was_traced(exported: Exported) -> None:
    """JAX keeps artifacts when a model is gone, and with them a megabyte for each load."""
    assert not to_artifact(lasting(exported)).has_vjp()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {"arguments": (Abstract("float32", "3, 5"), Abstract("float32", "4"))},
            "model.stablehlo takes tensor<3x4xf32>, expected tensor<3x5xf32> as in model.json",
        ),
        (
            {"arguments": (Abstract("bool", "3, 4"), Abstract("float32", "4"))},
            "model.stablehlo takes tensor<3x4xf32>, expected tensor<3x4xi1> as in model.json",
        ),
        (
            {"results": (Abstract("uint8", "3, 4"),)},
            "model.stablehlo returns tensor<3x4xf32>, expected tensor<3x4xui8> as in model.json",
        ),
        (
            {"unused": ()},
            "model.stablehlo takes tensor<3x4xf32>, expected tensor<3x4xf32>, tensor<4xf32> as",
        ),
        (
            {"platforms": ("cpu", "cuda")},
            "model.stablehlo takes , expected tensor<3x4xf32> as in model.json",
        ),
        ({"results": (Abstract("float33", "3, 4"),)}, "written by jax 0.1 and cannot be read by"),
        ({"arguments": (Abstract("float32", "3, ("),)}, "dimension '3, (': expected a name"),
        ({"module": b"garbage"}, "model.stablehlo was written by jax 0.1 and cannot be read by"),
    ],
)
def test_computation_that_is_not_as_described_is_refused(
    exported: Exported, changed: dict[str, object], expected: str
) -> None:
    described = dataclasses.replace(lasting(exported), **changed)  # type: ignore[arg-type]

    with pytest.raises(InvalidModel) as caught:
        artifact.from_computation(described, "0.1")
    assert expected in str(caught.value)


def test_stablehlo_of_the_future_is_told_from_damage(exported: Exported) -> None:
    module = b"ML\xefR\x0dStableHLO_v9.99.9\0 in words that are not known yet"
    described = dataclasses.replace(of_artifact(exported), module=module)

    with pytest.raises(InvalidModel) as caught:
        artifact.from_computation(described, "2.0")
    said = f"it is StableHLO 9.99.9, {newest_stablehlo()} is the newest supported: "
    assert f"{said}serve it with jax 2.0 or newer." in str(caught.value)


def test_function_that_calls_something_else_is_refused() -> None:
    check = jax.export.DisabledSafetyCheck.custom_call("evil")
    x = jax.ShapeDtypeStruct((2,), np.float32)
    function = jax.jit(lambda x: jax.ffi.ffi_call("evil", x)(x))
    found = jax.export.export(function, disabled_checks=[check])(x)

    with pytest.raises(InvalidModel, match=r"^model\.stablehlo calls 'evil'"):
        artifact.from_computation(lasting(found), "0.1")
