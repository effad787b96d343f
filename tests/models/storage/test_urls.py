from pathlib import Path

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.residence.repository.wrong_root import check_roots
from xlaserve.settings import Settings
from xlaserve.storage import urls

ALL = ("s3", "gs", "az", "hf", "http", "https")


def check(url: str, *schemes: str) -> None:
    check_roots(Settings.read({}, repository=url, remote_schemes=schemes))


@pytest.mark.parametrize(
    "url", ["s3://bucket/models", "http://127.0.0.1:80/models", "hf://org/name@main/models"]
)
def test_a_path_of_the_settings_holds_a_url(url: str) -> None:
    assert url == urls.url_of(Settings.read({}, repository=url).repository)


@pytest.mark.parametrize("path", ["/models", "models", "./s3:/bucket", "a/s3:/bucket", "C:models"])
def test_a_path_of_the_disk_is_no_url(path: str) -> None:
    assert "" == urls.url_of(Path("/") / path)


def test_a_url_is_refused_unless_its_scheme_is_allowed() -> None:
    """URLs are off by default: the error names the setting."""
    with pytest.raises(InvalidSettings, match="setting remote_schemes: expected s3 among them"):
        check("s3://bucket/models")
    with pytest.raises(InvalidSettings, match="setting remote_schemes: expected http among them"):
        check("http://127.0.0.1/models", "https")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "EXTRAS", {"s3": ("remote-s3", ("no_such_module",))})

    with pytest.raises(InvalidSettings, match=r"pip install 'xlaserve\[remote-s3\]'"):
        check("s3://bucket/models", "s3")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://host/models", "a URL with one of s3://"),
        ("ftp://user:secret@host/models", "a URL without credentials"),
        ("s3://key:secret@bucket/models", "a URL without credentials"),
        ("https://user:secret@host/models", "a URL without credentials"),
        ("https://host/models?sig=secret", "a URL without a query"),
        ("https://host/models#secret", "a URL without a query"),
        ("https://host/a/../models", "without '..'"),
        ("memory://models", "a URL with one of s3://"),
    ],
)
def test_a_url_that_is_none_of_a_repository_is_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidSettings) as raised:
        check(url, *ALL)

    assert reason in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_url_is_given_once() -> None:
    settings = Settings.read(
        {},
        repository="http://127.0.0.1/models",
        model_repository=["http://127.0.0.1/models"],
        remote_schemes=["http"],
    )

    with pytest.raises(InvalidSettings, match="a URL not already given"):
        check_roots(settings)


def test_a_model_root_is_no_url() -> None:
    """Meshes and SageMaker download models themselves."""
    settings = Settings.read({}, repository="/", model_root=["s3://bucket/models"])

    with pytest.raises(InvalidSettings, match="model_root: expected a directory instead of a URL"):
        check_roots(settings)
