"""`xlaserve serve --open` opens the status page, and reports when it cannot."""

import asyncio
from pathlib import Path

import pytest
from support.process import command, run, served

pytestmark = pytest.mark.asyncio

_SECONDS = 120.0


async def test_the_page_of_the_server_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake browser that records its URL, renaming the file into place when complete."""
    seen, part, browser = (tmp_path / name for name in ("seen", "part", "browser"))
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {part}\nmv {part} {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    empty = tmp_path / "models"
    empty.mkdir()
    async with served(empty, "--http-endpoint", "port:0", "--open") as server:
        async with asyncio.timeout(_SECONDS):
            while not seen.exists():
                await asyncio.sleep(0.05)
        address = server.http

    assert f"http://{address.removeprefix('http://')}/" == seen.read_text()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--http-endpoint", "none"),
            "setting http_endpoint: expected an HTTP endpoint with --open",
        ),
        (("--processes", "2"), "setting processes: expected 1 with --open, got '2'"),
    ],
)
async def test_a_server_without_a_page_of_its_own_says_so(
    tmp_path: Path, flags: tuple[str, str], text: str
) -> None:
    status, _, error = await run(*command("serve", str(tmp_path), "--open", *flags))

    assert 1 == status
    assert text in error
