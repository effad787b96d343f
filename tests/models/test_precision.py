"""The precision of FP32 products on GPUs and TPUs, if the model leaves it open."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import asyncio
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding
from support.server import Serve
from typer.testing import CliRunner

import xlaserve
from xlaserve.cli import application
from xlaserve.offline.device_plan import DevicePlanner
from xlaserve.offline.targets.jobs import Job
from xlaserve.offline.targets.warming_plan import WarmingPlan
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.runtime.devices import target_kinds as kinds
from xlaserve.runtime.devices.packing import UNPACKED
from xlaserve.runtime.devices.sites import Site
from xlaserve.runtime.programs import compilation
from xlaserve.runtime.programs.compilation import Compilation, XlaOptions
from xlaserve.runtime.programs.executables import Executables, Wanted
from xlaserve.runtime.programs.kept_programs import KeptPrograms
from xlaserve.settings import Settings
from xlaserve.settings.choices import MatmulPrecision

F32, BF16 = jnp.float32, jnp.bfloat16
HIGHEST = XlaOptions(precision="HIGHEST")


def _image(size: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, size, 8, 8), dtype)


def _square(dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((4, 4), dtype)


def _convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def _looping(a: jax.Array, b: jax.Array) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: c @ b, a)


def _with(precision: Any) -> Callable[..., Any]:
    return lambda a, b: jnp.matmul(a, b, precision=precision)


def _site(platform: str) -> Site:
    return Site(jax.local_devices(backend="cpu")[:1], platform=platform)


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (jnp.matmul, (_square(), _square()), "highest"),
        (jnp.matmul, (_square(jnp.complex64), _square(jnp.complex64)), "highest"),
        (_convolve, (_image(3), jax.ShapeDtypeStruct((2, 3, 3, 3), F32)), "highest"),
        (_looping, (_square(), _square()), "highest"),
        (jax.jit(_looping), (_square(), _square()), "highest"),
        (_with("default"), (_square(), _square()), "highest"),
        # The precision set by the author takes precedence.
        (_with("high"), (_square(), _square()), "high"),
        (_with(("highest", "default")), (_square(), _square()), "highest,default"),
        # Precision does not apply to BF16 and integers.
        (jnp.matmul, (_square(BF16), _square(BF16)), ""),
        (jnp.matmul, (_square(jnp.int32), _square(jnp.int32)), ""),
    ],
)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_open_products_are_compiled_with_the_precision(
    function: Any, arguments: tuple[Any, ...], expected: str, platform: str
) -> None:
    """Checked in XLA's text of the compiled program, on the CPU instead of the device."""
    wide = expected if "," in expected else f"{expected},{expected}"

    made = HIGHEST.compiled(jax.jit(function).lower(*arguments), _site(platform))

    found = set(re.findall(r"operand_precision=\{([\w,]+)\}", made.as_text()))
    assert ({wide} if expected else set()) == found


def test_products_of_groups_have_it_and_algorithms_stay() -> None:
    """Compilation on the CPU removes both, so the input to XLA is checked."""
    rows, groups = jax.ShapeDtypeStruct((6, 4), F32), jax.ShapeDtypeStruct((2, 4, 3), F32)
    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    algorithm = jax.ShapeDtypeStruct((4, 4), F32)
    grouped = jax.jit(lax.ragged_dot).trace(rows, groups, sizes)
    chosen = jax.jit(_with(lax.DotAlgorithmPreset.TF32_TF32_F32)).trace(algorithm, algorithm)
    texts = []
    for traced in (grouped, chosen):
        lowered = _Kept(traced.lower(lowering_platforms=("tpu",)))
        HIGHEST.compiled(lowered, _site("tpu"))
        texts.append(lowered.as_text())

    assert "HIGHEST" in texts[0]
    assert "HIGHEST" not in texts[1]


class _Kept:
    """A program lowered for an absent device, which is not compiled."""

    def __init__(self, lowered: Any) -> None:
        self.compiler_ir, self.as_text = lowered.compiler_ir, lowered.as_text

    def compile(self, **options: object) -> None:
        assert options


def test_artifacts_get_it_and_their_file_stays(tmp_path: Path) -> None:
    """The server compiles a call of the artifact that `jax.export` wrote."""
    exported = jax.export.export(jax.jit(jnp.matmul), platforms=("cpu", "cuda"))(
        _square(), _square()
    )
    texts = [
        XlaOptions(precision=name).compiled(
            # A new jitted function each time, because it caches what was lowered and compiled.
            jax.jit(partial(exported.call)).lower(_square(), _square()),
            _site(where),
        )
        for name, where in (("DEFAULT", "cuda"), ("HIGHEST", "cpu"), ("HIGH", "cuda"))
    ]

    assert ["highest" in one.as_text() for one in texts] == [False, False, False]
    assert ["={high,high}" in one.as_text() for one in texts] == [False, False, True]
    assert b"HIGH" not in exported.mlir_module_serialized


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("default", "DEFAULT"),
        ("high", "HIGH"),
        ("tensorfloat32", "HIGH"),
        ("highest", "HIGHEST"),
        ("float32", "HIGHEST"),
    ],
)
def test_names_are_those_of_jax(word: str, name: str) -> None:
    settings = Settings.read({"XLASERVE_MATMUL_PRECISION": word}, repository=Path("/m"))

    assert name == XlaOptions.of(settings).precision
    assert lax.Precision(word).name == name
    assert name in MatmulPrecision.__members__


def _names(precision: str, platform: str) -> tuple[tuple[str, ...], ...]:
    kept = KeptPrograms(Compilation(options=XlaOptions(precision=precision)), "m", "1")
    device = jax.local_devices(backend="cpu")[0]
    x = jax.ShapeDtypeStruct((1,), np.float32, sharding=SingleDeviceSharding(device))
    place = kept.described(_site(platform), "computation", "", [x], None)
    return place.names, place.names_in_store


def test_a_program_is_kept_by_its_precision() -> None:
    """Keys differ in the directory and in the store; the default key is that of older releases."""
    assert 3 == len({_names(one, "cuda") for one in ("DEFAULT", "HIGH", "HIGHEST")})
    assert _names("DEFAULT", "cpu") == _names("HIGHEST", "cpu")
    assert {} == XlaOptions().key("cuda", 1) == XlaOptions().key("tpu", 1)
    assert {"matmul_precision": "HIGHEST"} == HIGHEST.key("tpu", 1)


def test_programs_of_one_process_are_told_apart() -> None:
    site = _site("cuda")
    x = jax.ShapeDtypeStruct((1,), np.float32, sharding=site.outputs)

    def key(options: XlaOptions) -> object:
        made = Executables(None, UNPACKED, Compilation(options=options))  # type: ignore[arg-type]
        return made.key(Wanted(site, [], [x], None))

    assert key(HIGHEST) != key(XlaOptions())


class _Stop(Exception):
    pass


class _Compilers:
    """Records the jobs without executing them."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def compile(self, jobs: Iterable[Job], on_done: object) -> None:
        self.jobs += jobs
        raise _Stop


def test_plans_and_caches_are_made_with_the_settings(tmp_path: Path, example_models: Path) -> None:
    settings = Settings.read({}, repository=example_models, matmul_precision="highest")
    compilers = _Compilers()

    with pytest.raises(_Stop):
        DevicePlanner(settings, open_repositories(settings), compilers).plan(kinds.named("h100"))  # type: ignore[arg-type]

    assert {"HIGHEST"} == {job.options.precision for job in compilers.jobs}
    job = msgspec.json.decode(msgspec.json.encode(compilers.jobs[0]), type=Job)
    assert compilers.jobs[0] == job
    plan = WarmingPlan("/c", 1, "", XlaOptions.of(settings))
    assert plan == msgspec.json.decode(plan.command[-1], type=WarmingPlan)


def _shown(url: str) -> list[str]:
    arguments = ["models", "show", "m", "--url", url]
    result = CliRunner().invoke(application(), arguments, env={"NO_COLOR": "1"})
    assert result.exception is None, result.output
    return result.output.splitlines()


async def test_a_server_computes_with_it_and_says_so(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU simulates a device with selectable precision."""
    texts: list[str] = []
    real = XlaOptions.compiled

    def noted(self: XlaOptions, lowered: Any, site: Any) -> Any:
        made = real(self, lowered, site)
        texts.append(made.as_text())
        return made

    where = {**compilation._OF_PLATFORMS, "matmul_precision": ("cpu",)}
    monkeypatch.setattr(compilation, "_OF_PLATFORMS", where)
    monkeypatch.setattr(XlaOptions, "compiled", noted)
    xlaserve.export_model(
        lambda p, x: {"y": x @ p["w"]},
        {"w": np.ones((4, 3), np.float32)},
        {"x": ("FP32", [-1, 4])},
        tmp_path / "models" / "m" / "1",
        max_batch_size=1,
    )

    settings = {"compile_processes": 0, "http_endpoint": "port:0", "load_model": ("m",)}
    async with serve(tmp_path / "models", matmul_precision="float32", **settings) as server:
        shown = [
            await asyncio.to_thread(_shown, url) for url in (server.url, f"http://{server.http}")
        ]

    assert texts
    assert all("operand_precision={highest,highest}" in text for text in texts)
    for lines in shown:
        assert "FP32 products: highest precision (matmul_precision)" in lines
