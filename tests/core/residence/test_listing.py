"""Entries of a directory: which ones are models, and which model an archive holds."""

from pathlib import Path

import pytest

from xlaserve.errors import InvalidModel
from xlaserve.residence.repository.listing import is_model, list_root, subdirectories, unpacked


def put(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("{}")


def test_subdirectories_are_neither_hidden_nor_files(tmp_path: Path) -> None:
    put(tmp_path, "a/x", "b/x", ".hidden/x", "file", ".hidden-file")

    assert ["a", "b"] == sorted(path.name for path in subdirectories(tmp_path))
    assert [] == subdirectories(tmp_path / "file")
    assert [] == subdirectories(tmp_path / "absent")


def test_the_listing_of_a_root_leaves_out_what_is_hidden_and_says_what_is_no_model(
    tmp_path: Path,
) -> None:
    put(tmp_path, "a/x", ".hidden/x", ".hidden-file", "file", "lost+found/x")
    found = list_root(tmp_path, max_models=10)

    assert ("a",) == found.models
    assert {"file": "it is a file, expected a directory"} == found.skipped


def test_models_past_the_limit_are_left_out_with_the_reason(tmp_path: Path) -> None:
    """The first models by name are kept."""
    put(tmp_path, "c/x", "a/x", "d/x", "b/x")
    found = list_root(tmp_path, max_models=2)

    assert ("a", "b") == found.models
    reason = "it exceeds the limit of 2 models (max_models)"
    assert {"c": reason, "d": reason} == found.skipped


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("1/model.json", True),
        ("config.pbtxt", True),
        ("config.json", True),
        (".1/model.json", False),
        ("a/1/model.json", False),
        ("a/config.pbtxt", False),
    ],
)
def test_a_model_has_a_configuration_or_a_version(
    tmp_path: Path, path: str, expected: bool
) -> None:
    put(tmp_path, path)

    assert expected is is_model(tmp_path)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["m/1/model.json", ".git/1/model.json"], "m"),
        (["m/1/model.json", ".git/config.json"], "m"),
        (["m/1/model.json", "notes/x"], "m"),
        (["m/model.json", ".DS_Store"], "m"),
        (["m/model.json", ".git/x"], "m"),
        (["m/model.json", "README"], "."),
        (["m/model.json", "n/model.json"], "."),
        (["1/model.json", "m/1/model.json"], "."),
        ([".git/1/model.json"], "."),
        (["model.json"], "."),
    ],
)
def test_an_archive_holds_the_model_that_is_not_hidden(
    tmp_path: Path, paths: list[str], expected: str
) -> None:
    put(tmp_path, *paths)

    assert tmp_path / expected == unpacked(tmp_path)


def test_an_archive_with_several_models_is_refused_by_their_names(tmp_path: Path) -> None:
    put(tmp_path, "b/1/x", "a/config.json", ".c/1/x")

    with pytest.raises(InvalidModel, match="expected one: 'a', 'b'$"):
        unpacked(tmp_path)
