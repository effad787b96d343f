"""Pictures of each view for the documentation, at both widths and in both themes.

`SCREENSHOTS=docs/img pytest -m slow tests/interop/test_screenshots.py` makes them anew. `slow`
checks each view at one width in one theme, and at the other in the other; `large` the rest.
"""

import asyncio
import io
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from PIL import Image
from support import identity_models, tiny_chat
from support.browser import Page
from support.mesh import code, dial
from support.process import ServerProcess, served
from support.server import RunningServer, serving

from xlaserve.settings.choices import ModelControlMode

DOCS = Path(__file__).resolve().parents[2] / "docs"
COLOURS = 256
MOST_BYTES = 120_000
REQUESTS = 30
"""One of this many requests fails."""
_SECONDS = 0.05

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass(frozen=True)
class View:
    """A view: its address, when it is ready, where to scroll, and which server has it."""

    name: str
    address: str
    ready: str
    shown: str = "document.body"
    of_mesh: bool = False


VIEWS = (
    # The history has a point every ten seconds: wait for enough points to draw a line.
    View(
        "overview",
        "",
        "/L.*L.*L/.test(document.querySelector('#over-latency path')?.getAttribute('d') ?? '')",
    ),
    View("model", "#/models/simple", "document.querySelector('#model-buckets table') !== null"),
    View(
        "events",
        "#/events",
        "document.querySelectorAll('#events-list tbody tr').length > 2",
    ),
    View(
        "try",
        "#/models/simple",
        "document.querySelector('#try-inputs .field') !== null &&"
        " (document.querySelector('#try-outputs').childElementCount > 0 ||"
        " document.querySelector('#try-form button').click())",
        "document.getElementById('try')",
    ),
    View(
        "chat",
        "#/models/story",
        "document.getElementById('chat-code').checkVisibility() &&"
        " (document.getElementById('chat-status').textContent.includes('answer') ||"
        " ((document.getElementById('chat-text').value ="
        " document.getElementById('chat-log').firstChild ? '' : 'tell me a story') &&"
        " document.querySelector('#chat-form [type=submit]').click()))",
        "document.getElementById('generator')",
    ),
    View(
        "documentation",
        "v2/docs",
        "document.querySelector('#post_v2_models_by_model_infer form .answer p + *') !== null ||"
        " document.querySelector('#post_v2_models_by_model_infer form button').click()",
        "document.getElementById('post_v2_models_by_model_infer')",
    ),
    View(
        "mesh",
        "#/hosting",
        "document.querySelectorAll('#hosting-models tbody tr').length > 3 &&"
        " document.querySelector('#hosting-events tbody tr') !== null",
        of_mesh=True,
    ),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(
    tmp_path_factory: pytest.TempPathFactory, example_models: Path
) -> AsyncIterator[ServerProcess]:
    root = tmp_path_factory.mktemp("models")
    for name in ("simple", "digits", "mlp"):
        shutil.copytree(example_models / name, root / name)
    identity_models.write(root, "texts", "BYTES")
    tiny_chat.export(root / "story")
    (root / "broken" / "1").mkdir(parents=True)
    loads = [flag for name in ("simple", "mlp", "story") for flag in ("--load-model", name)]
    async with served(root, "--model-control-mode", "explicit", *loads) as server:
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(_ask(session, f"http://{server.http}/v2"))
            try:
                yield server
            finally:
                asking.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="mesh")
async def _mesh(
    tmp_path_factory: pytest.TempPathFactory, example_models: Path
) -> AsyncIterator[RunningServer]:
    """A server whose models were loaded by a mesh; one was unloaded again, one failed to load."""
    folder = tmp_path_factory.mktemp("mesh")
    (folder / "none").mkdir()
    running = serving(
        folder,
        folder / "none",
        modelmesh=True,
        model_control_mode=ModelControlMode.NONE,
        http_endpoint="port:0",
        model_root=(example_models,),
    )
    async with running as server, dial(server.url) as mesh:
        await mesh.status()
        for number, example in enumerate(("simple", "digits", "mlp", "mlp", "identity")):
            await mesh.load(f"{example}-isvc-{number}", example_models / example)
        await mesh.unload("identity-isvc-4")
        await code(mesh.load("lost-isvc", example_models / "absent"))
        yield server


async def _ask(session: aiohttp.ClientSession, url: str) -> None:
    """Create something to show: successful and failed requests, and a failed load."""
    tensor = {"datatype": "INT32", "shape": [1, 16], "data": [1] * 16}
    inputs = [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]
    async with session.post(f"{url}/repository/models/broken/load") as answer:
        await answer.read()
    for number in itertools.count():
        body = {"inputs": inputs[: 2 if number % REQUESTS else 1]}
        async with session.post(f"{url}/models/simple/infer", json=body) as answer:
            await answer.read()
        await asyncio.sleep(_SECONDS)


@pytest.mark.parametrize(
    ("width", "theme"),
    [
        (1280, "light"),
        (400, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.large),
        pytest.param(400, "light", marks=pytest.mark.large),
    ],
)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
async def test_each_view_has_a_picture(
    page: Page,
    server: ServerProcess,
    mesh: RunningServer,
    tmp_path: Path,
    view: View,
    width: int,
    theme: str,
) -> None:
    host = mesh.http if view.of_mesh else server.http
    await page.open("about:blank")
    await page.open(f"http://{host}/{view.address}", width=width, dark=theme == "dark")
    await page.until(view.ready)
    await page.evaluate(f"{view.shown}.scrollIntoView()")
    await page.screenshot(tmp_path / "shot.png")
    name = f"page-{view.name}-{width}-{theme}.png"
    data = _small(tmp_path / "shot.png")
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        (Path(folder) / name).write_bytes(data)

    assert (DOCS / "img" / name).exists()
    assert MOST_BYTES > len(data)
    assert f"img/{name}" in (DOCS / "index.md").read_text()


def _small(file: Path) -> bytes:
    """Return a picture with a palette, which has a third of the size."""
    written = io.BytesIO()
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS).save(written, "PNG", optimize=True)
    return written.getvalue()
