"""Extensions from other packages: found by entry point, enabled by a setting."""

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from support.process import command, run, served
from support.server import serving

from xlaserve.errors import InvalidSettings

pytestmark = pytest.mark.asyncio

CODE = """
from xlaserve.app.extensions import Extension
from xlaserve.http.messages import HttpResponse
from xlaserve.http.routing import Route
from xlaserve.serving.call import Operation


async def _answer(request):
    return HttpResponse(parts=[b"shouted"])


def _routes(core):
    return [Route("GET", "/shout", Operation.HEALTH, _answer, "Shouts", "people")]


EXTENSION = Extension("shout", http=_routes)
"""

Install = Callable[[str, str], Path]


@pytest.fixture(name="install")
def _install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a package with a module and an entry point for it."""

    def _installed(name: str, code: str) -> Path:
        folder = tmp_path / "packages"
        about = folder / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (folder / f"{name}.py").write_text(code)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        rows = f"[xlaserve.extensions]\n{name} = {name}:EXTENSION\n"
        (about / "entry_points.txt").write_text(rows)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return _installed


async def test_a_server_started_for_it_serves_it(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one process and with two: each process that answers requests builds the extension."""
    folder = install("shouting", CODE)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    (tmp_path / "models").mkdir()
    for flags in ((), ("--processes", "2")):
        async with (
            served(tmp_path / "models", "--extension", "shouting", *flags) as server,
            aiohttp.ClientSession() as session,
            session.get(f"http://{server.http}/shout") as answer,
        ):
            assert (200, "shouted") == (answer.status, await answer.text())


async def test_what_no_setting_names_is_not_imported(install: Install, tmp_path: Path) -> None:
    install("silence", "raise RuntimeError('imported')")
    (tmp_path / "models").mkdir()
    async with (
        serving(tmp_path, tmp_path / "models", http_endpoint="port:0") as server,
        aiohttp.ClientSession(f"http://{server.http}") as session,
        session.get("/shout") as answer,
    ):
        assert 404 == answer.status


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("absent", CODE, "expected an installed extension (absent), got 'another'"),
        ("ending", "raise SystemExit(3)", "'ending: ending:EXTENSION: SystemExit: 3'"),
        ("missing", "import nothing_of_this_name", "ModuleNotFoundError: No module named"),
        ("odd", "EXTENSION = 1", "expected an Extension object, got 'odd: odd:EXTENSION is of"),
    ],
)
async def test_what_cannot_be_had_is_refused_in_words(
    install: Install, tmp_path: Path, name: str, code: str, text: str
) -> None:
    install(name, code)
    asked = "another" if name == "absent" else name
    with pytest.raises(InvalidSettings) as raised:
        async with serving(tmp_path, tmp_path, http_endpoint="port:0", extension=(asked,)):
            pass

    assert text in str(raised.value)


async def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    status, _, error = await run(*command("serve", str(tmp_path), "--extension", "nothing"))

    assert 1 == status
    assert "setting extension: expected an installed extension (none), got 'nothing'" in error
