"""Local copies of repositories in object stores, for commands."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.object_server import serving_objects

from xlaserve.errors import InvalidSettings
from xlaserve.offline.local_copy import local_copy
from xlaserve.residence.repository.repositories import open_repositories
from xlaserve.settings import Settings

CONFIG = b'{"backend": "identity", "version_policy": {"specific": {"versions": [1, 3]}}}'
OBJECTS = {
    "root/m/config.json": CONFIG,
    "root/m/labels.txt": b"one",
    **{f"root/m/{number}/weights": bytes([number]) for number in (1, 2, 3)},
    "root/broken/config.json": b"{",
    "root/broken/1/weights": b"",
}


@pytest.fixture
def url() -> Iterator[str]:
    with serving_objects(**OBJECTS) as (made, _):
        yield made


def settings(folder: Path, *roots: str | Path) -> Settings:
    first, *others = map(Path, roots)
    return Settings(
        repository=first,
        model_repository=tuple(others),
        remote_cache_directory=str(folder / "cache"),
    )


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_each_version_that_is_served_is_there_while_it_lasts(url: str, tmp_path: Path) -> None:
    """A model that cannot be read is listed in `failures` with the reason."""
    with local_copy(settings(tmp_path, url)) as copy:
        root = copy.settings.repository
        there = files(root)
        source = open_repositories(copy.settings).find("m")
        numbers = [version.number for version in source.versions]

    assert {
        "m/config.json": CONFIG,
        "m/labels.txt": b"one",
        "m/1/weights": b"\1",
        "m/3/weights": b"\3",
    } == there
    assert [1, 3] == numbers
    assert ["broken"] == list(copy.failures)
    assert "config.json" in copy.failures["broken"]
    assert not root.exists()
    assert b"\3" in files(tmp_path / "cache").values()


def test_directories_stay_what_they_are(url: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with local_copy(settings(tmp_path, tmp_path / "models")) as alone:
        assert tmp_path / "models" == alone.settings.repository
    with local_copy(settings(tmp_path, tmp_path / "models", url)) as both:
        assert tmp_path / "models" == both.settings.repository
        assert ["m"] == open_repositories(both.settings).names()


@pytest.mark.parametrize(
    ("root", "text"),
    [
        ("nowhere", "expected a directory"),
        ("http://user:secret@127.0.0.1/m", "without credentials"),
        (
            "http://127.0.0.1:1/m",
            r"expected a URL that can be listed \(.*refused\), got 'http://127",
        ),
    ],
)
def test_what_is_no_repository_is_refused(tmp_path: Path, root: str, text: str) -> None:
    with pytest.raises(InvalidSettings, match=text) as raised, local_copy(settings(tmp_path, root)):
        pass

    assert "secret" not in str(raised.value)
