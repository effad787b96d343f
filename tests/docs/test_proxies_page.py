"""The proxies page contains the configuration files that its tests use."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "proxies").iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_in_the_page_as_it_is(file: Path) -> None:
    page = (ROOT / "docs" / "proxies.md").read_text()

    assert f"\n{file.read_text()}```\n" in page
