"""How wide the vectors of programs for the CPU are, and who says so."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from xlaserve.models import compilation_cache, vectors
from xlaserve.models.compilation import Compilation, XlaOptions
from xlaserve.models.kept_programs import KeptPrograms
from xlaserve.models.sites import Site

WIDE = {"xla_cpu_prefer_vector_width": 512}
OTHER = "--xla_cpu_prefer_vector_width=256"


def _has(monkeypatch: pytest.MonkeyPatch, directory: Path, line: str) -> None:
    """Give this machine a processor."""
    info = directory / line.partition(":")[2].strip().replace(" ", "-")
    info.write_text(f"processor\t: 0\nmodel name\t: avx512_bf16\n{line}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", info)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 clzero", WIDE),
        ("flags\t\t: fpu avx2 avx512f avx512dq", {}),
        ("flags\t\t: fpu avx2", {}),
        ("Features\t: fp asimd bf16", {}),
    ],
)
def test_they_are_wide_where_that_slows_no_core_down(
    line: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    _has(monkeypatch, tmp_path, line)

    assert expected == XlaOptions().for_site("cpu", 1)
    assert {} == XlaOptions().for_site("cuda", 1)
    assert {} == XlaOptions().for_site("tpu", 1)


def test_the_flags_of_the_process_count_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _has(monkeypatch, tmp_path, "flags\t\t: fpu avx512_bf16")
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false {OTHER}")
    assert {} == XlaOptions().for_site("cpu", 1)

    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert WIDE == XlaOptions().for_site("cpu", 1)


def test_a_machine_that_says_nothing_has_no_wide_vectors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "none")

    assert {} == vectors.options("")


def test_xla_knows_the_option_by_its_name() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((4,), np.float32))
    lowered.compile(compiler_options={vectors.OPTION: vectors.BITS})

    with pytest.raises(JaxRuntimeError, match="xla_cpu_no_such_option"):
        lowered.compile(compiler_options={"xla_cpu_no_such_option": True})


def test_programs_of_another_width_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = Site([jax.local_devices(backend="cpu")[0]], platform="cpu")

    def options() -> str:
        kept = KeptPrograms(Compilation(), "m", "1")
        return kept.described(site, "c", "", (), None).environment["options"]

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    _has(monkeypatch, tmp_path, "flags\t\t: fpu avx512_bf16")
    wide = options()
    _has(monkeypatch, tmp_path, "flags\t\t: fpu avx2")

    assert ("xla_cpu_prefer_vector_width=512", "") == (wide, options())
