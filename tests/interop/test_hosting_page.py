"""ModelMesh's view in a real browser: counts, loaded models and unloaded models."""

from pathlib import Path

import pytest
from support import identity_models
from support.browser import Page
from support.mesh import dial
from support.server import Serve

from xlaserve.settings.choices import ModelControlMode

HOSTILE = "<img src=x onerror=hacked=1>"

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def text(page: Page, part: str) -> str:
    shown: str = await page.evaluate(f"document.getElementById({part!r}).innerText")
    return shown


async def test_a_mesh_is_shown_with_what_it_counts_and_hostile_ids_are_text(
    page: Page, serve: Serve, tmp_path: Path, axe: str
) -> None:
    """One model is loaded, one was unloaded, and one could not be loaded."""
    identity_models.write(tmp_path / "files", "identity", "FP32")
    path = tmp_path / "files" / "identity"
    (tmp_path / "none").mkdir()
    page.complaints.clear()
    async with (
        serve(
            tmp_path / "none",
            modelmesh=True,
            model_control_mode=ModelControlMode.NONE,
            http_endpoint="port:0",
            model_root=(tmp_path / "files",),
        ) as server,
        dial(server.url) as mesh,
    ):
        limits = await mesh.status()
        loaded = await mesh.load(HOSTILE, path)
        await mesh.load("gone", path)
        await mesh.unload("gone")
        with pytest.raises(Exception, match="absent"):
            await mesh.load("bad", tmp_path / "files" / "absent")
        await page.open("about:blank")
        await page.open(f"http://{server.http}/", width=400, dark=True)
        await page.until("!document.getElementById('hosting-link').hidden")
        await page.evaluate("document.getElementById('hosting-link').click()")
        await page.until("document.querySelector('#hosting-models tbody tr') !== null")
        await page.until("document.querySelectorAll('#hosting-events tbody tr').length > 1")
        cells = await page.evaluate(
            "[...document.querySelectorAll('#hosting-models tbody tr > *')].map((c) => c.innerText)"
        )
        memory = (await text(page, "hosting-memory")).split("\n")
        told = await page.evaluate(
            "Promise.all([import('./page/words.js'), fetch('page/hosting').then((a) => a.json())])"
            ".then(([{ bytes }, { models, limits }]) =>"
            " [models[0].told_bytes, bytes(models[0].told_bytes), limits.capacity_bytes,"
            " bytes(limits.capacity_bytes)])"
        )
        events = await text(page, "hosting-events")
        findings = await page.findings(axe)
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert await page.evaluate(fits)
        images = await page.evaluate("document.querySelectorAll('#content img').length")

    assert "ModelMesh" == await text(page, "hosting-title")
    assert [loaded.sizeInBytes, limits.capacityInBytes] == told[::2]
    assert [HOSTILE, told[1]] == [cells[0], cells[2]]
    assert 4 == len(cells)
    assert told[3] == memory[memory.index("Reported capacity") + 1]
    assert "gone" in events
    assert "Load failed" in events
    assert "undefined" == await page.evaluate("typeof hacked")
    assert 0 == images
    assert [] == findings
