# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.export import Exported

from xlaserve.artifact import artifact, manifest
from xlaserve.artifact.manifest import ARTIFACT, WEIGHTS, Manifest
from xlaserve.artifact.weights import WeightEntry
from xlaserve.errors import InvalidModel
from xlaserve.files.files import FileRecord
from xlaserve.tensors import DATATYPES, TensorSpec

FP32 = DATATYPES["FP32"]
ENTRY = WeightEntry("w", np.dtype(np.float32), (4, 2), 0, 32)


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    ],
)
def test_dtypes_have_the_names_of_mlir(dtype: str) -> None:
    with jax.enable_x64(True):
        argument = jax.ShapeDtypeStruct((2, 3), jnp.dtype(dtype))
        module = jax.jit(lambda x: x).lower(argument).as_text()

    assert f"%arg0: {artifact._tensor_type(argument)}" in module


def _manifest(**fields: Any) -> Manifest:
    described = Manifest(
        inputs=(TensorSpec("x", FP32, (-1, 4)),),
        outputs=(TensorSpec("y", FP32, (-1, 2)),),
        max_batch_size=8,
        parameters=("w",),
        parameters_bytes=32,
        files={ARTIFACT: FileRecord(0, ""), WEIGHTS: FileRecord(0, "")},
        platforms=("cpu",),
        jax_version="0.9.2",
        exported_at="",
    )
    return dataclasses.replace(described, **fields)


def _matmul(leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    return [inputs[0] @ leaves[0]]


def _exported(
    fn: Callable[..., object] = _matmul, batch: str = "b", size: str = "4", **options: Any
) -> Exported:
    leaves = [jax.ShapeDtypeStruct((4, 2), np.float32)]
    shape = jax.export.symbolic_shape(f"{batch}, {size}")
    inputs = [jax.ShapeDtypeStruct(shape, np.float32)]
    return jax.export.export(jax.jit(fn), **options)(leaves, inputs)


def test_artifact_that_is_what_the_manifest_says_passes() -> None:
    artifact.check(_exported(), _manifest(), [ENTRY], "cpu")


def _returning_a_dict(leaves: list[jax.Array], inputs: list[jax.Array]) -> dict[str, jax.Array]:
    return {"y": inputs[0] @ leaves[0]}


def _doubling(leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    return [jnp.concatenate([inputs[0], inputs[0]])[:, :2]]


@pytest.mark.parametrize(
    ("exported", "fields", "entries", "platform", "expected"),
    [
        ({}, {}, [ENTRY], "cuda", "was exported for cpu, this server runs on cuda"),
        ({}, {"parameters": ()}, [], "cpu", "does not take the 0 parameters and 1 inputs"),
        ({}, {"inputs": _manifest().inputs * 2}, [ENTRY], "cpu", "1 parameters and 2 inputs"),
        ({}, {"outputs": _manifest().outputs * 2}, [ENTRY], "cpu", "not return the 2 outputs"),
        ({"fn": _returning_a_dict}, {}, [ENTRY], "cpu", "does not return the 1 outputs"),
        ({}, {}, [], "cpu", "parameter 'w' is in only one of params.safetensors and model.json"),
        (
            {},
            {},
            [dataclasses.replace(ENTRY, shape=(2, 4))],
            "cpu",
            "parameter 'w': expected float32[4, 2], got float32[2,4]",
        ),
        (
            {},
            {},
            [dataclasses.replace(ENTRY, dtype=np.dtype(np.int32))],
            "cpu",
            "parameter 'w': expected float32[4, 2], got int32[4,2]",
        ),
        (
            {},
            {"inputs": (TensorSpec("x", FP32, (-1, 5)),)},
            [ENTRY],
            "cpu",
            "input 'x': expected float32[-1,4] as in the artifact, got FP32[-1,5] from model.json",
        ),
        (
            {},
            {"outputs": (TensorSpec("y", DATATYPES["FP16"], (-1, 2)),)},
            [ENTRY],
            "cpu",
            "output 'y': expected float32[-1,2] as in the artifact, got FP16[-1,2] from",
        ),
        (
            {"batch": "3"},
            {},
            [ENTRY],
            "cpu",
            "input 'x' has the shape (3, 4), and its first dimension is not the batch",
        ),
        (
            {"batch": "n"},
            {},
            [ENTRY],
            "cpu",
            "input 'x' has the shape (n, 4), and its first dimension is not the batch",
        ),
        (
            {},
            {"max_batch_size": 0, "inputs": (TensorSpec("x", DATATYPES["FP32"], (3, 4)),)},
            [ENTRY],
            "cpu",
            "input 'x' has the shape (b, 4), but only some inputs have a dynamic first dimension",
        ),
        (
            {"size": "n", "fn": lambda leaves, inputs: [inputs[0][:, :2]]},
            {},
            [ENTRY],
            "cpu",
            "input 'x' has the shape (b, n), but dimensions other than a leading batch",
        ),
        (
            {"fn": _doubling},
            {},
            [ENTRY],
            "cpu",
            "output 'y' has the shape (2*b, 2), and its first dimension is not the batch",
        ),
    ],
)
def test_other_artifact_is_refused(
    exported: dict[str, Any],
    fields: dict[str, Any],
    entries: list[WeightEntry],
    platform: str,
    expected: str,
) -> None:
    with pytest.raises(InvalidModel) as caught:
        artifact.check(_exported(**exported), _manifest(**fields), entries, platform)
    assert expected in str(caught.value)


def test_artifact_for_several_devices_is_refused() -> None:
    """Where the parameters lie is the server's to say."""
    mesh = jax.sharding.AbstractMesh((2,), ("i",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i"))
    x = jax.ShapeDtypeStruct((4, 2), np.float32, sharding=sharding)
    exported = jax.export.export(jax.jit(lambda leaves, inputs: inputs))([x], [x])

    with pytest.raises(InvalidModel, match="was exported for 2 devices, expected 1"):
        artifact.check(exported, _manifest(), [ENTRY], "cpu")


@pytest.mark.parametrize("data", [b"", b"garbage", b"\0" * 100, bytes(range(256)) * 8])
def test_unreadable_artifact_tells_both_versions_of_jax(data: bytes) -> None:
    with pytest.raises(InvalidModel) as caught:
        artifact.deserialize(bytearray(data), "0.3.1")
    assert "was written by jax 0.3.1 and cannot be read by the installed jax " in str(caught.value)
    assert f" installed jax {jax.__version__}: " in str(caught.value)
    assert (
        ". Run `xlaserve repo migrate` with the jax that wrote it, or a newer one; if it is"
        " damaged, export it again" in str(caught.value)
    )


def _cholesky(leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    return [jnp.linalg.cholesky(leaves[0][:2] @ leaves[0][:2].T)]


def _random(leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(0), (2,), np.float32)]


def _sorted(leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    return [jax.lax.top_k(inputs[0], 2)[0]]


def _inverse(leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
    return [jnp.linalg.inv(leaves[0][:2]), *jnp.linalg.eigh(leaves[0][:2])]


@pytest.mark.parametrize("fn", [_matmul, _cholesky, _random, _sorted, _inverse])
def test_functions_of_xla_may_be_called(fn: Callable[..., object]) -> None:
    exported = _exported(fn, platforms=("cpu", "cuda"))

    artifact.check_custom_calls(exported.mlir_module())


@pytest.mark.parametrize(
    "text",
    [
        "stablehlo.custom_call @xla_python_cpu_callback(%1)",
        'stablehlo.custom_call @"xla_ffi_python_cpu_callback"(%1)',
        'stablehlo.custom_call @"lapack_spotrf_ffi\\22"(%1)',
        '"stablehlo.custom_call"(%1) {call_target_name = "evil"}',
        "stablehlo.custom_call @tpu_custom_call(%1)",
        "stablehlo.custom_call @lapack_spotrf_ffi(%1)\nstablehlo.custom_call @evil(%1)",
        "stablehlo.custom_call @Sharding.evil(%1)",
    ],
)
def test_other_functions_may_not_be_called(text: str) -> None:
    with pytest.raises(InvalidModel, match="which models may not call"):
        artifact.check_custom_calls(text)


def test_a_kernel_that_this_jaxlib_does_not_have_is_named() -> None:
    """As one of another version may be; XLA would say so without what to do."""
    with pytest.raises(InvalidModel, match=r"calls 'lapack_sxyz_ffi', which jaxlib .* export it"):
        artifact.check_custom_calls("stablehlo.custom_call @lapack_sxyz_ffi(%1)")


def test_artifact_that_calls_something_else_is_refused(tmp_path: Path) -> None:
    """A callback into Python is refused by jax.export, unless it is told to let it pass."""

    def calling(leaves: list[jax.Array], inputs: list[jax.Array]) -> list[jax.Array]:
        return [jax.ffi.ffi_call("evil", inputs[0])(inputs[0])]

    check = jax.export.DisabledSafetyCheck.custom_call("evil")
    data = _exported(calling, batch="2", disabled_checks=[check]).serialize()

    with pytest.raises(InvalidModel, match=r"^model\.jaxexp calls 'evil'"):
        artifact.deserialize(data, jax.__version__)


def test_artifact_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifact, "LIMIT_ARTIFACT_BYTES", 3)
    (tmp_path / ARTIFACT).write_bytes(b"1234")

    with pytest.raises(InvalidModel, match="has 4 bytes, more than the 3 allowed"):
        artifact.read(tmp_path, _manifest())


def test_names_of_the_files_are_those_of_the_layout() -> None:
    assert ("model.json", "model.jaxexp", "params.safetensors") == (
        manifest.FILE_NAME,
        manifest.ARTIFACT,
        manifest.WEIGHTS,
    )
