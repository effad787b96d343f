"""Whatever happened to the files of a model, loading it ends with the model or InvalidModel."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xlaserve.artifact.manifest import ARTIFACT, FILE_NAME, STABLEHLO, WEIGHTS
from xlaserve.authoring.export import export_model
from xlaserve.errors import InvalidModel
from xlaserve.runtime import loaders
from xlaserve.runtime.loaded import LoadedModel

Load = Callable[..., LoadedModel]

CUTS = int(os.environ.get("CORRUPTION_CUTS", "25"))
FLIPS = int(os.environ.get("CORRUPTION_FLIPS", "60"))
"""Of each file; 64 and 1 000 with `tox run -e fuzz -- --rows D4`."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    params = {"w": np.ones((4, 300), np.float32), "b": np.ones((1, 300), np.float32)}
    path = tmp_path_factory.mktemp("whole") / "1"
    inputs = {"x": ("FP32", [-1, 4])}
    return export_model(
        lambda p, x: x @ p["w"] + p["b"], params, inputs, path, outputs=["y"], max_batch_size=1
    )


@pytest.fixture
def broken(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "1")


@pytest.mark.parametrize("name", [FILE_NAME, ARTIFACT, STABLEHLO, WEIGHTS])
def test_file_cut_anywhere_is_refused(broken: Path, load: Load, name: str) -> None:
    content = (broken / name).read_bytes()
    # The last byte of a manifest is the newline after it, which nothing needs.
    end = len(content) - (2 if name == FILE_NAME else 1)
    for size in {*range(0, end, -(-end // CUTS)), end}:
        (broken / name).write_bytes(content[:size])

        with pytest.raises(InvalidModel) as caught:
            load(broken)
        assert str(caught.value).startswith(name)


@pytest.mark.parametrize("name", [ARTIFACT, STABLEHLO, WEIGHTS])
def test_file_with_any_bit_flipped_is_refused(broken: Path, load: Load, name: str) -> None:
    """By its hash: parsing what is not as it was written could end anywhere in XLA."""
    content = (broken / name).read_bytes()
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), FLIPS).tolist():
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (broken / name).write_bytes(flipped)

        with pytest.raises(InvalidModel):
            load(broken)


def test_manifest_with_any_bit_flipped_is_refused_or_loads(broken: Path, load: Load) -> None:
    content = (broken / FILE_NAME).read_bytes()
    refused = 0
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), FLIPS).tolist():
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        (broken / FILE_NAME).write_bytes(flipped)
        try:
            assert 1 <= load(broken).info.max_batch_size
        except InvalidModel:
            refused += 1
    assert refused > FLIPS / 2


@pytest.mark.parametrize("name", [ARTIFACT, STABLEHLO, WEIGHTS])
def test_file_that_grew_is_refused(broken: Path, load: Load, name: str) -> None:
    with (broken / name).open("ab") as file:
        file.write(b"\0")

    with pytest.raises(InvalidModel, match=f"^{name} has .* bytes"):
        load(broken)


@pytest.mark.parametrize("name", [FILE_NAME, WEIGHTS])
def test_size_of_a_cut_file_is_not_predicted(broken: Path, name: str) -> None:
    content = (broken / name).read_bytes()
    for size in range(0, len(content) - 2, -(-len(content) // CUTS)):
        (broken / name).write_bytes(content[:size])

        with pytest.raises(InvalidModel):
            loaders.predict_size(broken)


def test_files_of_another_export_are_refused(broken: Path, tmp_path: Path, load: Load) -> None:
    other = export_model(
        lambda p, x: x, None, {"x": ("FP32", [-1, 4])}, tmp_path / "2", outputs=["y"]
    )
    shutil.copy(other / ARTIFACT, broken / ARTIFACT)

    with pytest.raises(InvalidModel, match=f"^{ARTIFACT} has .* bytes, the manifest says "):
        load(broken)
