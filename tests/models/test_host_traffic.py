"""Compiled programs exchange only inputs and outputs with the host."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from support.hlo import donates, host_traffic

from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders
from xlaserve.runtime.exported.jax_export import JaxExportModel
from xlaserve.runtime.load_context import LoadContext

X = jax.ShapeDtypeStruct((4, 8), np.float32)


def called_back(x: jax.Array) -> Any:
    return jax.pure_callback(lambda a: a, X, x)


def printed(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x[0, 0])
    return x * 2


def compiled(function: Callable[..., Any], **options: Any) -> str:
    """Return the optimized HLO of a function."""
    return jax.jit(function, **options).lower(X).compile().as_text() or ""


@pytest.mark.parametrize(("control", "kind"), [(called_back, "callback"), (printed, "callback")])
def test_control_is_seen(control: Callable[[jax.Array], jax.Array], kind: str) -> None:
    """Control: the check finds host traffic if there is any."""
    found = host_traffic(compiled(control))

    assert found
    assert all(line.startswith(kind) for line in found)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("  %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1, is_host_transfer=true",
         "transfer"),
        ("  %r = (f32[4]{0}, token[]) recv-done(%s), channel_id=2, is_host_transfer=true",
         "transfer"),
        ("  %i = (f32[4]{0}, token[]) infeed(%t), infeed_config=\"\"", "feed"),
        ("  %o = token[] outfeed(%x, %t)", "feed"),
        ("  %c = (f32[4,8]{1,0:T(8,128)S(5)}, f32[4,8]{1,0}, u32[]) copy-start(%x)",
         "host memory"),
        ("  %m = f32[4]{0} custom-call(%x), custom_call_target=\"MoveToHost\"", "placement"),
        ("  %c = f32[4]{0} custom-call(%x), custom_call_target=\"xla_ffi_python_gpu_callback\"",
         "callback"),
    ],
)  # fmt: skip
def test_what_other_platforms_have_is_seen(line: str, kind: str) -> None:
    assert [f"{kind}: {line.strip()}"] == host_traffic(f"ENTRY main {{\n{line}\n}}")


@pytest.mark.parametrize(
    "line",
    [
        "  %s = (f32[4]{0}, u32[], token[]) send(%x, %t), channel_id=1",
        "  %c = (f32[4,8]{1,0:T(8,128)S(1)}, f32[4,8]{1,0}, u32[]) copy-start(%x)",
        '  %d = f32[4]{0} custom-call(%x), custom_call_target="__cublas$gemm"',
    ],
)
def test_what_stays_on_the_devices_is_not_meant(line: str) -> None:
    assert [] == host_traffic(line)


def test_donation_is_seen() -> None:
    donating = compiled(lambda x: x + 1, donate_argnums=0)
    keeping = compiled(lambda x: x + 1)

    assert donates(donating)
    assert not donates(keeping)


@pytest.mark.parametrize("name", ["digits", "mlp"])
def test_programs_of_a_load_do_nothing_with_the_host(example_models: Path, name: str) -> None:
    """Nor do they overwrite arguments: the next request needs the parameters."""
    config = ModelConfig(max_batch_size=8, parameters={"batch_sizes": "1,8"})
    model = loaders.load(example_models / name / "1", LoadContext(name, "1", config))
    assert isinstance(model, JaxExportModel)
    texts = [program.call.as_text() for copy in model._copies for program in copy.programs]  # type: ignore[attr-defined]
    model.close()

    assert 2 == len(texts)
    assert [] == [line for text in texts for line in host_traffic(text)]
    assert not any(map(donates, texts))
