"""The release checks."""

import re
from pathlib import Path

import pytest

import release

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("changelog", "expected"),
    [
        ("# Changelog\n\n## [1.2.0] - 2030-01-01\n\n## [1.1.0]\n", "1.2.0"),
        ("## [Unreleased]\n", "Unreleased"),
        ("# Changelog\n", "none"),
    ],
)
def test_the_first_section_is_the_newest(changelog: str, expected: str) -> None:
    assert release.newest_changes(changelog) == expected


def test_changes_and_version_agree() -> None:
    assert release.newest_changes((ROOT / "CHANGELOG.md").read_text()) == release.version()


def test_the_version_is_in_one_place() -> None:
    """Charts and images have their own versions, independent of the code's."""
    number = re.escape(release.version())
    found = [
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "server").rglob("*.py"))
        if re.search(rf'"{number}"', file.read_text())
    ]

    assert found == []


def test_a_changelog_of_another_version_stops_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHANGELOG.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "CHANGELOG.md").write_text("## [0.0.9]\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)

    with pytest.raises(SystemExit, match=r"CHANGELOG\.md begins with 0\.0\.9"):
        release.main([])
