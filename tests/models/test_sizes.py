import hashlib
import json
import shutil
from pathlib import Path

import pytest

from xlaserve.artifact import manifest, sizes
from xlaserve.errors import InvalidModel


def test_parameters_are_counted_to_the_byte(affine_directory: Path) -> None:
    """Five buckets; FP32 [4,300] and [300]; six input rows of [4], six output rows of [300].

    The product and the sum are computed one after the other; estimates are multiplied by 1.6.
    """
    module = _largest_file(affine_directory)
    held = 4 * (1200 + 300) + 5 * sizes.EXECUTABLE_BYTES + module
    found = sizes.predict_exported(affine_directory) - held

    assert 4 * 6 * (4 + 300) <= found <= 4 * 6 * 4 + 1.6 * 2 * 4 * 6 * 300 + 100


def _largest_file(directory: Path) -> int:
    """Return the size in bytes of the largest file except the parameters."""
    names = set(manifest.read(directory).files) - {manifest.WEIGHTS}
    return max((directory / name).stat().st_size for name in names)


@pytest.mark.parametrize(("there", "expected"), [(0, 0), (3, 3), (5, 5), (100, 5)])
def test_what_others_have_of_a_computation_is_not_predicted_again(
    affine_directory: Path, there: int, expected: int
) -> None:
    """The expected number is of its five batch sizes; never more than the whole prediction."""
    module = affine_directory / manifest.STABLEHLO
    sha256 = hashlib.sha256(module.read_bytes()).hexdigest()
    shared = sizes.shared_bytes(affine_directory, {sha256: there}.__getitem__)

    held = _largest_file(affine_directory) if there else 0
    assert expected * sizes.EXECUTABLE_BYTES + held == shared
    assert shared <= sizes.predict_exported(affine_directory)


def test_other_weights_than_the_manifest_says_are_refused(
    affine_directory: Path, tmp_path: Path
) -> None:
    directory = shutil.copytree(affine_directory, tmp_path / "1")
    document = json.loads((directory / "model.json").read_text()) | {"parameters_bytes": 1}
    (directory / "model.json").write_text(json.dumps(document))

    with pytest.raises(InvalidModel) as caught:
        sizes.predict_exported(directory)
    assert "params.safetensors has 6000 bytes of parameters, model.json says 1" == str(caught.value)


def test_artifact_with_parameters_baked_in_is_refused(
    affine_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "LIMIT_ARTIFACT_BYTES", 100)

    with pytest.raises(InvalidModel, match=r"model\.jaxexp has .* more than the 100 allowed"):
        sizes.predict_exported(affine_directory)
