"""Loading torch.export programs from a repository, without a server."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.pt2_models import answers, path

from xlaserve.artifact import onnx_source
from xlaserve.artifact.onnx_source import OnnxSource
from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ConfigTensor, ModelConfig
from xlaserve.offline import contents
from xlaserve.runtime import loaders, trial
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.loaded import LoadedModel
from xlaserve.runtime.programs.compilation import Compilation
from xlaserve.runtime.programs.conversions import Conversions
from xlaserve.tensors import DATATYPES, Tensor

PLAIN = ModelConfig()
BOTH = tuple(ConfigTensor(name, DATATYPES["INT64"], (7,)) for name in ("ids", "mask"))
SETTLED = ModelConfig(max_batch_size=4, inputs=BOTH)


def _version(tmp_path: Path, name: str) -> Path:
    """Return a version directory with this test program."""
    directory = tmp_path / "1"
    directory.mkdir()
    shutil.copy(path(name), directory / "model.pt2")
    return directory


def _loaded(place: Path, scratch: Path, config: ModelConfig = PLAIN) -> LoadedModel:
    compilation = Compilation(conversions=Conversions(scratch=scratch))
    return loaders.load(place, LoadContext("m", "1", config, compilation=compilation))


def _assert_answers(
    model: LoadedModel, given: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    names = [spec.name for spec in model.info.inputs]
    found = model.execute(dict(zip(names, given, strict=True)))
    model.close()

    for want, got in zip(expected, found.values(), strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)


def test_rows_that_are_looked_up_by_their_number_are_batched(tmp_path: Path) -> None:
    """transformers models look up masks and last tokens like this."""
    model = _loaded(_version(tmp_path, "by-number"), tmp_path)

    assert ("proved", 32) == (str(model.info.verdict), model.info.max_batch_size)
    _assert_answers(model, *answers("by-number"))


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_program_is_served_as_it_lies_there(tmp_path: Path, *, is_alone: bool) -> None:
    """As a directory or as a file; the load leaves no other files."""
    version = _version(tmp_path, "mlp")
    place = version / "model.pt2" if is_alone else version
    model = _loaded(place, tmp_path)

    assert "pt2" == loaders.recognised(place, PLAIN)
    assert 8 == model.info.max_batch_size
    assert ["1"] == [path.name for path in tmp_path.iterdir()]
    _assert_answers(model, *answers("mlp"))


@pytest.mark.slow
def test_a_configuration_settles_what_the_program_leaves_open(tmp_path: Path) -> None:
    model = _loaded(_version(tmp_path, "transformer"), tmp_path, SETTLED)

    assert 4 == model.info.max_batch_size
    _assert_answers(model, *answers("transformer"))


OTHER_SIZE = replace(BOTH[1], dims=(8,))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PLAIN, "input 'ids': its dimension 's27' is dynamic"),
        (replace(SETTLED, inputs=(BOTH[0], OTHER_SIZE)), "'s27' is 8 here, but 7 elsewhere"),
        (
            replace(SETTLED, inputs=(replace(BOTH[0], name="x"),)),
            "unknown input 'x', the model has ids, mask",
        ),
        (replace(SETTLED, inputs=(replace(BOTH[0], dims=(7, 7)),)), "expected 2 dimensions, got 3"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    tmp_path: Path, config: ModelConfig, reason: str
) -> None:
    version = _version(tmp_path, "transformer")

    with pytest.raises(InvalidModel, match=rf"^model\.pt2 cannot be converted: .*{reason}"):
        _loaded(version, tmp_path, config)
    assert ["1"] == [path.name for path in tmp_path.iterdir()]


def test_a_file_that_is_no_program_is_refused_by_its_name(tmp_path: Path) -> None:
    version = _version(tmp_path, "mlp")
    for data in (b"", b"PK\x03\x04 and no more"):
        (version / "model.pt2").write_bytes(data)
        with pytest.raises(InvalidModel, match=r"^model\.pt2 cannot be converted: "):
            _loaded(version, tmp_path)


def test_an_onnx_model_goes_first_and_a_name_goes_before_both(tmp_path: Path) -> None:
    version = _version(tmp_path, "mlp")
    (version / "model.onnx").write_bytes(b"")
    (version / "another.pt2").write_bytes(b"")
    named = ModelConfig(default_model_filename="another.pt2")

    assert ["onnx", "pt2"] == [loaders.recognised(version, config) for config in (PLAIN, named)]
    assert "another.pt2" == _source(version, named).path.name


def _source(version: Path, config: ModelConfig = PLAIN) -> OnnxSource:
    found = onnx_source.find(version, config)
    assert found is not None
    return found


def test_what_a_client_sends_is_converted_by_a_process_of_its_own(tmp_path: Path) -> None:
    version = _version(tmp_path, "mlp")
    trial.try_loading(version, 120.0, source=_source(version))

    (version / "model.pt2").write_bytes(b"nothing")
    with pytest.raises(InvalidModel, match=r"^model\.pt2 cannot be converted: "):
        trial.try_loading(version, 120.0, source=_source(version))


def test_its_tensors_are_compared_one_by_one(tmp_path: Path) -> None:
    found = contents.read(_version(tmp_path, "mlp"), "pt2", PLAIN).items

    assert ["input"] == list(found["input"])
    assert "float32[s31,4]" == found["input"]["input"].text
    assert ["output"] == list(found["output"])
    assert 4 == len(found["parameter"])
    assert all(item.sha256 for item in found["parameter"].values())
