"""The root of a repository: one model itself, or a directory of models."""

from pathlib import Path

import pytest

from xlaserve.errors import ModelNotFound
from xlaserve.residence.repository.repository import Repository


def bare(root: Path) -> Repository:
    return Repository(root, max_models=10, max_config_bytes=1 << 20, bare_name="model")


def put(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("{}")


def test_one_of_several_models_may_have_the_name_of_the_only_one(tmp_path: Path) -> None:
    """The name means the model in that directory, not the root."""
    put(tmp_path, "model/1/model.json", "other/1/model.json")
    repository = bare(tmp_path)
    (version,) = repository.find("model").versions

    assert ["model", "other"] == repository.names()
    assert repository.holds("model")
    assert repository.holds("other")
    assert tmp_path / "model" / "1" == version.directory
    assert str(tmp_path / "model") == repository.directory("model")


def test_its_fingerprint_is_that_of_its_directory(tmp_path: Path) -> None:
    put(tmp_path, "model/1/model.json", "other/1/model.json")
    repository = bare(tmp_path)
    before = repository.fingerprint("model")
    put(tmp_path, "other/2/model.json")
    beside = repository.fingerprint("model")
    put(tmp_path, "model/2/model.json")

    assert before == beside
    assert before != repository.fingerprint("model")


def test_another_model_of_a_root_that_is_one_is_not_found(tmp_path: Path) -> None:
    put(tmp_path, "1/model.json")
    repository = bare(tmp_path)

    assert str(tmp_path) == repository.directory("model")
    assert str(tmp_path / "other") == repository.directory("other")
    with pytest.raises(ModelNotFound):
        repository.find("other")


@pytest.mark.parametrize("hidden", [".cache/1/model.json", ".cache/config.pbtxt"])
def test_hidden_directories_make_no_repository_of_a_root(tmp_path: Path, hidden: str) -> None:
    put(tmp_path, hidden)
    repository = bare(tmp_path)

    assert ["model"] == repository.names()
    assert str(tmp_path) == repository.directory("model")


def test_a_hidden_directory_is_no_model_beside_others(tmp_path: Path) -> None:
    put(tmp_path, ".cache/1/model.json", "digits/1/model.json")

    assert ["digits"] == bare(tmp_path).names()
