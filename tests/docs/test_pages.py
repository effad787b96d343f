"""Pages of docs/ that promise to be tested: every command and line of code is run."""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.process import ServerProcess, command, served

# It starts programs one after the other, each with JAX.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"

_STEP = re.compile(
    r"^```(sh|python)\n(.*?)^```$|^    (?:[^\n]*&& )?(xlaserve serve [^\n]*)$", re.M | re.S
)


def steps(page: str, section: str = "") -> Iterator[tuple[str, str]]:
    """Yield the steps of a page in order: (sh, python or serve, the text).

    With `section`, only those of that section.
    """
    whole = (DOCS / page).read_text()
    if section:
        whole = whole.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    for language, text, serve in _STEP.findall(whole):
        yield (language, text) if language else ("serve", serve)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory as the reader has it: it contains the examples, and takes the output."""
    shutil.copytree(ROOT / "examples" / "models", tmp_path / "examples" / "models")
    shutil.copytree(ROOT / "examples" / "data", tmp_path / "examples" / "data")
    programs = tmp_path / "bin"
    programs.mkdir()
    line = " ".join(f"'{word}'" for word in command())
    (programs / "xlaserve").write_text(f'#!/bin/sh\nexec {line} "$@"\n')
    (programs / "xlaserve").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def at(server: ServerProcess | None, text: str) -> str:
    """Substitute the address of the test's server, whose port is dynamic."""
    if server is None:
        return text
    text = re.sub(r"\bxlaserve (health|infer)\b", rf"xlaserve \1 --url {server.url}", text)
    return text.replace("127.0.0.1:8001", server.url).replace("127.0.0.1:8000", server.http)


async def executed(page: str, checkout: Path) -> None:
    """Run the steps of a page, each block of code as a separate program."""
    async with AsyncExitStack() as running:
        server: ServerProcess | None = None
        for kind, text in steps(page):
            if kind == "serve":
                if server is not None:
                    assert 0 == await server.stop()
                _, _, repository, *flags = text.split()
                server = await running.enter_async_context(served(Path(repository), *flags))
            elif kind == "sh":
                await shell(at(server, text))
            else:
                await run_code(checkout, at(server, text))


async def run_code(checkout: Path, text: str) -> None:
    file = checkout / "page_code.py"
    file.write_text(text)
    await shell(f"'{sys.executable}' '{file}'")


async def shell(text: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "sh", "-ec", text, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()

    assert 0 == process.returncode, f"{text}\n{said.decode()}"
    assert '"error"' not in said.decode()


@pytest.mark.skipif(sys.platform != "linux", reason="the commands are of a Unix shell")
async def test_five_minutes(checkout: Path) -> None:
    found = list(steps("getting-started.md"))
    await executed("getting-started.md", checkout)

    assert ["serve", "sh", "sh", "sh", "python", "python", "sh", "serve", "python"] == [
        kind for kind, _ in found
    ]
    assert (checkout / "models/tiny/1/model.json").is_file()


async def test_serving_from_python(checkout: Path) -> None:
    found = list(steps("client.md", "Serving from Python"))
    await run_code(checkout, "".join(text for _, text in found))

    assert (checkout / "models/tiny/1/model.json").is_file()


async def test_every_export_is_a_model(checkout: Path) -> None:
    """Each block of code continues where the previous one ended."""
    await run_code(checkout, "".join(text for _, text in steps("exporting.md")))
    await shell("xlaserve repo check models")

    assert ["classifier", "compared", "forecast", "regressor"] == sorted(
        path.name for path in (checkout / "models").iterdir()
    )
