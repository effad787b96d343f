"""What XLA is told, and what an operator hears of settings that do nothing."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError
from support.server import Serve

from xlaserve.errors import InvalidSettings
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.programs import compilation
from xlaserve.runtime.programs.compilation import XlaOptions
from xlaserve.settings import Settings

ALL = XlaOptions(command_buffers=False, latency_hiding=True, autotune_directory="/nowhere")
X = jax.ShapeDtypeStruct((4,), np.float32)


@pytest.mark.parametrize(
    ("options", "devices", "expected"),
    [
        (XlaOptions(), 1, {}),
        (XlaOptions(), 2, {"xla_gpu_enable_latency_hiding_scheduler": True}),
        (XlaOptions(latency_hiding=False), 2, {}),
        (XlaOptions(command_buffers=False), 1, {"xla_gpu_graph_min_graph_size": 2**31 - 1}),
        (
            XlaOptions(autotune_directory="/a"),
            1,
            {"xla_gpu_per_fusion_autotune_cache_dir": "/a"},
        ),
    ],
)
def test_what_programs_for_gpus_are_compiled_with(
    options: XlaOptions, devices: int, expected: dict[str, object]
) -> None:
    assert expected == options.for_site("cuda", devices)
    assert {} == options.for_site("cpu", devices)
    assert {} == options.for_site("tpu", devices)


def test_xla_knows_every_option_by_its_name() -> None:
    """It knows those of GPUs wherever it compiles, and refuses what it does not know."""
    lowered = jax.jit(lambda x: x + 1).lower(X)
    for name, value in ALL.for_site("cuda", 2).items():
        lowered.compile(compiler_options={name: value})

    with pytest.raises(JaxRuntimeError, match="xla_gpu_no_such_option"):
        lowered.compile(compiler_options={"xla_gpu_no_such_option": True})


def test_settings_say_where_programs_and_tunings_are_kept(tmp_path: Path) -> None:
    def made(**settings: object) -> compilation.Compilation:
        return compilation.of_settings(Settings.read({}, repository=tmp_path, **settings))

    kept = made(compilation_cache_directory=str(tmp_path / "c"), compilation_cache_max_bytes=7)
    untuned = made(compilation_cache_directory=str(tmp_path / "c"), gpu_autotune_cache=False)
    nowhere = made(compilation_cache_directory="none")

    assert kept.cache is not None
    assert (tmp_path / "c", 7) == (kept.cache.directory, kept.cache.max_bytes)
    assert str(tmp_path / "c" / "autotune") == kept.options.autotune_directory
    assert "" == untuned.options.autotune_directory == nowhere.options.autotune_directory
    assert nowhere.cache is None
    assert not made(gpu_command_buffers=False).options.command_buffers
    assert not made(gpu_latency_hiding_scheduler=False).options.latency_hiding


def test_a_bucket_is_no_directory_for_programs(tmp_path: Path) -> None:
    """It would be one of that name, on this machine, which nobody else sees."""
    settings = Settings(repository=tmp_path, compilation_cache_directory="s3://bucket/cache")

    with pytest.raises(
        InvalidSettings, match="directory; set URLs in compilation_cache_url.*s3://bucket"
    ):
        compilation.of_settings(settings)


@pytest.mark.parametrize(
    ("url", "schemes", "expected"),
    [
        ("s3://bucket/programs", (), r"^setting remote_schemes: expected s3 among them"),
        ("s3://key:secret@bucket/programs", ("s3",), "expected a URL without credentials"),
        ("ftp://host/programs", ("ftp",), "^setting compilation_cache_url: expected"),
        ("/mnt/programs", (), "^setting compilation_cache_url: expected"),
    ],
)
def test_store_of_programs_is_used_where_its_scheme_is_allowed(
    tmp_path: Path, url: str, schemes: tuple[str, ...], expected: str
) -> None:
    """It says what the server executes: nobody has it by accident."""
    settings = Settings(repository=tmp_path, compilation_cache_url=url, remote_schemes=schemes)

    with pytest.raises(InvalidSettings, match=expected) as raised:
        compilation.of_settings(settings)
    assert "secret" not in str(raised.value)


def test_no_store_is_asked_unless_one_is_named(tmp_path: Path) -> None:
    none = compilation.of_settings(Settings(repository=tmp_path))
    url = "http://127.0.0.1:1/programs"
    settings = Settings(repository=tmp_path, compilation_cache_url=url, remote_schemes=("http",))
    named = compilation.of_settings(settings)

    assert none.store is None
    assert named.store is not None
    assert (url, False) == (named.store.url, named.store.is_writable)
    assert not named.has_no_programs


def test_settings_without_effect_are_those_that_were_changed(tmp_path: Path) -> None:
    changed = Settings(repository=tmp_path, gpu_memory_fraction=0.5, gpu_command_buffers=False)

    assert () == compilation.without_effect(changed, "cuda")
    assert () == compilation.without_effect(Settings(repository=tmp_path), "cpu")
    for platform in ("cpu", "tpu"):
        assert ("gpu_memory_fraction", "gpu_command_buffers") == compilation.without_effect(
            changed, platform
        )


async def test_server_names_settings_without_effect(
    serve: Serve, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").mkdir()
    async with serve(tmp_path / "models", gpu_autotune_cache=False):
        printed = "".join(capfd.readouterr())

    assert "settings without effect" in printed
    assert "settings=['gpu_autotune_cache']" in printed


def test_flags_are_those_that_may_change_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--xla_b=1 --xla_dump_to=/x  --xla_a=2 --xla_force_host_platform_device_count=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_c=3 --xla_b=1")

    assert "--xla_a=2 --xla_b=1 --xla_tpu_c=3" == compilation.flags()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "0.5"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.3"}, "0.3"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}, None),
    ],
)
def test_memory_fraction_is_that_of_the_setting_unless_xla_is_told(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], expected: str | None
) -> None:
    """Where both of its variables are set, XLA refuses to start."""
    environment = {**said}
    monkeypatch.setattr(os, "environ", environment)

    jax_runtime.start("cpu", memory_fraction=0.5)

    assert expected == environment.get("XLA_CLIENT_MEM_FRACTION")
