"""Parameters that stay in their file while the model is served."""

import gc
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from support.plain_models import load_plain

from xlaserve.artifact.manifest import WEIGHTS
from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime.exported import jax_export
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.programs import programs

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="there is no /proc to see mappings in"
)

CONTEXT = LoadContext("m", "1", ModelConfig(), mmap_parameters=True)
X = np.ones((2, 64), np.float32)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model with a large parameter, and a small one that becomes a constant."""
    params = {"w": np.eye(64, dtype=np.float32) * 3, "b": np.ones((1, 64), np.float32)}
    inputs = {"x": ("FP32", [-1, 64])}
    return export_model(
        lambda p, x: x @ p["w"] + p["b"],
        params,
        inputs,
        tmp_path / "m" / "1",
        outputs=["y"],
        max_batch_size=2,
    )


def _mappings(directory: Path) -> list[range]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ours = [line.split()[0].split("-") for line in lines if line.endswith(str(directory / WEIGHTS))]
    return [range(int(start, 16), int(end, 16)) for start, end in ours]


def test_arrays_on_the_cpu_are_the_file(directory: Path) -> None:
    """Only small parameters are copied; unloading closes the file."""
    model = load_plain(directory, CONTEXT)
    (mapping,) = _mappings(directory)

    (copy,) = model._copies
    assert [False, True] == [leaf.unsafe_buffer_pointer() in mapping for leaf in copy.leaves]
    assert np.array_equal(X * 3 + 1, np.asarray(model.execute({"x": X})["y"]))
    model.close()
    assert [] == _mappings(directory)


def test_file_that_is_replaced_stays_what_it_was(directory: Path) -> None:
    """Tools that write models replace a file by a new one with the same name."""
    model = jax_export.load(directory, CONTEXT)
    other = directory / "other"
    other.write_bytes(bytes((directory / WEIGHTS).stat().st_size))
    other.replace(directory / WEIGHTS)

    assert np.array_equal(X * 3 + 1, np.asarray(model.execute({"x": X})["y"]))
    model.close()


def test_nothing_is_mapped_without_being_asked(directory: Path) -> None:
    model = jax_export.load(directory, LoadContext("m", "1", ModelConfig()))

    assert [] == _mappings(directory)
    model.close()


def test_mapping_of_a_load_that_fails_goes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> object:
        raise jax.errors.JaxRuntimeError("INTERNAL: no such luck")

    monkeypatch.setattr(programs.Compiler, "compile", failing)

    with pytest.raises(InvalidModel, match="no such luck"):
        jax_export.load(directory, CONTEXT)
    gc.collect()
    assert [] == _mappings(directory)


@pytest.mark.parametrize("mapped", [True, False])
def test_processes_account_for_equal_parts_of_what_they_map(directory: Path, mapped: bool) -> None:
    """Parameters that are read, and small ones, which are packed, are counted by each process."""
    model = load_plain(directory, replace(CONTEXT, mmap_parameters=mapped))
    of_four = load_plain(directory, replace(CONTEXT, mmap_parameters=mapped, processes=4))
    large, small = 64 * 64 * 4, 64 * 4

    assert large + small == model.info.memory.parameters_bytes
    expected = large // 4 + small if mapped else large + small
    assert expected == of_four.info.memory.parameters_bytes
    held = of_four.info.memory
    assert held.total_bytes == sum(held.per_device.values())


def test_what_is_not_aligned_for_the_compiler_is_accounted_for_as_a_copy(tmp_path: Path) -> None:
    """The second parameter has an odd size before it, so its start is not aligned for XLA."""
    params = {name: np.ones((1, 301), np.float32) for name in "ab"}
    directory = export_model(
        lambda p, x: x + p["a"] + p["b"],
        params,
        {"x": ("FP32", [-1, 301])},
        tmp_path / "m" / "1",
        outputs=["y"],
        max_batch_size=2,
    )
    one, two = (load_plain(directory, replace(CONTEXT, processes=count)) for count in (1, 2))

    assert 301 * 4 // 2 == one.info.memory.parameters_bytes - two.info.memory.parameters_bytes
