"""Errors for a directory without a model distinguish four mistakes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import ModelConfig
from xlaserve.runtime import loaders

LOOKED_FOR = (
    ", looked for model.json, generator.json, model.py, model.onnx, model.pt2 or one *.jaxexp"
)


def lists_versions(path: Path) -> None:
    for version in ("1", "2"):
        (path / version).mkdir(parents=True)


def is_above(path: Path) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "model.json").write_text("{}")


def leads_elsewhere(path: Path) -> None:
    lists_versions(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def lost_its_manifest(path: Path) -> None:
    path.mkdir()
    for name in ("e", "d", "c", "b", "a", ".hidden"):
        (path / name).touch()


CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "not there": (lambda path: None, "there is no directory 'm'"),
    "empty": (Path.mkdir, "the directory 'm' is empty"),
    "versions": (
        lists_versions,
        "the directory 'm' contains the versions 1, 2 but no model files: name one of these",
    ),
    "above": (is_above, "the model is one level below, in inner: name that directory"),
    "a link": (leads_elsewhere, "the directory 'm', the target of a link, has no such file"),
    "others": (lost_its_manifest, "the directory 'm' holds a, b, c, d and 1 more"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_there_is_said(tmp_path: Path, case: str) -> None:
    make, expected = CASES[case]
    make(tmp_path / "m")

    with pytest.raises(InvalidModel) as raised:
        loaders.predict_size(tmp_path / "m")

    assert f"model.json is missing: {expected}{LOOKED_FOR}" == str(raised.value)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ModelConfig(default_model_filename="a.onnx"), "a.onnx"),
        (ModelConfig(backend="onnxruntime"), "model.onnx"),
    ],
)
def test_the_file_that_is_named_is_what_is_missing(
    tmp_path: Path, config: ModelConfig, name: str
) -> None:
    """Nothing else was looked for."""
    lost_its_manifest(tmp_path / "m")

    with pytest.raises(InvalidModel) as raised:
        loaders.predict_size(tmp_path / "m", config)

    assert f"{name} is missing: the directory 'm' holds a, b, c, d and 1 more" == str(raised.value)


@pytest.mark.parametrize(
    "row", [row for row in loaders.LOADERS if row.looked_for], ids=lambda row: row.looked_for
)
def test_what_is_said_to_be_looked_for_is(tmp_path: Path, row: loaders.Loader) -> None:
    """Each file that the text names makes an empty directory a model of its row."""
    (tmp_path / row.looked_for.replace("one *", "some")).touch()

    assert row is next(one for one in loaders.LOADERS if one.sniff(tmp_path, ModelConfig()))
    assert row.looked_for in LOOKED_FOR
