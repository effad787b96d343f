"""The page of a model in a real browser: contents and actions."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from support import identity_models
from support.browser import Page
from support.process import ServerProcess, served

from xlaserve.serving.access.tokens import digest_of, new_token

HOSTILE = "<img src=x onerror=hacked=1> /?#%41"
ENSEMBLE = "chain"
STEP = "step"
TWO = "two"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def write_models(root: Path, examples: Path) -> None:
    """Write a JAX program, a model used in an ensemble, and one with a hostile name."""
    shutil.copytree(examples / "simple", root / "simple", dirs_exist_ok=True)
    for name in (STEP, TWO, HOSTILE.replace("/", ":")):
        identity_models.write(root, name, "FP32")
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    step = {"model_name": STEP, "input_map": {"x": "x"}, "output_map": {"y": "y"}}
    config = {
        "platform": "ensemble",
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {"step": [step]},
    }
    (root / ENSEMBLE / "1").mkdir(parents=True)
    (root / ENSEMBLE / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module", name="root")
def _root(tmp_path_factory: pytest.TempPathFactory, example_models: Path) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root, example_models)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(root: Path) -> AsyncIterator[ServerProcess]:
    loads = [flag for name in ("simple", ENSEMBLE) for flag in ("--load-model", name)]
    async with served(root, "--model-control-mode", "explicit", *loads) as server:
        yield server


def address(server: ServerProcess, model: str) -> str:
    return f"http://{server.http}/#/models/{quote(model, safe='')}"


async def show(
    page: Page, server: ServerProcess, model: str, *, width: int = 1280, dark: bool = False
) -> None:
    """Open the page of a model, and wait until it shows the model's state."""
    page.complaints.clear()
    await page.open("about:blank")
    await page.open(address(server, model), width=width, dark=dark)
    await page.until("document.getElementById('model-state').textContent")


async def text(page: Page, part: str) -> str:
    shown: str = await page.evaluate(f"document.getElementById({part!r}).innerText")
    return shown


def button(verb: str) -> str:
    return f"document.querySelector('#model-actions [data-verb={verb}]')"


async def state_is(page: Page, state: str) -> None:
    await page.until(f"document.getElementById('model-state').textContent === {state!r}")


async def test_the_page_of_a_program_says_what_it_takes_costs_and_proves(
    page: Page, server: ServerProcess
) -> None:
    tensor = {"datatype": "INT32", "shape": [3, 16], "data": [1] * 48}
    inputs = [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]
    url = f"http://{server.http}/v2/models/simple/infer"
    async with aiohttp.ClientSession() as session:
        for asked in (inputs, inputs[:1]):
            async with session.post(url, json={"inputs": asked}) as answer:
                await answer.read()
    await show(page, server, "simple")
    await page.until("document.getElementById('model-config').textContent.includes('max_batch')")

    assert "INPUT0" in await text(page, "model-tensors")
    assert "OUTPUT1" in await text(page, "model-tensors")
    assert "the analysis of the program proved it" in await text(page, "model-independence")
    assert "of the rows that were computed were padding" in await text(page, "model-buckets")
    assert "executables" in await text(page, "model-memory")
    assert "cpu:0" in await text(page, "model-memory")
    assert "1 invalid" in await text(page, "model-statistics")
    assert "MissingInputs" in await text(page, "model-errors")
    assert "simple \N{EN DASH} xlaserve" == await page.evaluate("document.title")
    assert [] == page.complaints


async def test_an_unload_says_what_it_gives_back_and_breaks_and_can_be_undone(
    page: Page, server: ServerProcess
) -> None:
    await show(page, server, STEP)
    await page.until(f"{button('unload')}.checkVisibility()")
    await page.evaluate(f"{button('unload')}.click()")
    await page.until("document.getElementById('confirm').open")
    question = await text(page, "confirm-text")
    await page.evaluate("document.querySelector('#confirm [value=\"\"]').click()")
    await page.until("document.getElementById('model-state').textContent === 'READY'")
    await page.until(f"{button('unload')}.getAttribute('aria-disabled') === 'false'")
    await page.evaluate(f"{button('unload')}.click()")
    await page.until("document.getElementById('confirm').open")
    await page.evaluate("document.getElementById('confirm-yes').click()")
    await state_is(page, "UNAVAILABLE")
    notice = await text(page, "problems")
    await page.evaluate("document.querySelector('#problems button').click()")
    await state_is(page, "READY")

    assert "This frees" in question
    assert f"“{ENSEMBLE}”" in question
    assert "is unloaded" in notice
    assert [] == page.complaints


async def press(page: Page, verb: str) -> None:
    """Click a button of a model, and confirm the action."""
    await page.until(f"{button(verb)}.checkVisibility()")
    await page.until(f"{button(verb)}.getAttribute('aria-disabled') === 'false'")
    await page.evaluate(f"{button(verb)}.click()")
    await page.until("document.getElementById('confirm').open")
    await page.evaluate("document.getElementById('confirm-yes').click()")


async def test_a_reload_and_a_load_can_be_taken_back(
    page: Page, server: ServerProcess, root: Path
) -> None:
    """Undo restores version 1 after version 2 has replaced it; the button states the cost."""
    answering = "document.getElementById('model-about').textContent"
    undo = "document.querySelector('#problems p:last-child button')"
    await show(page, server, TWO)
    await press(page, "load")
    await state_is(page, "READY")
    loaded = await text(page, "problems")
    (root / TWO / "2").mkdir()
    await press(page, "reload")
    await page.until(f"{answering}.startsWith('version 2')")
    reloaded = await page.until(f"{undo}?.textContent.startsWith('Serve') && {undo}.textContent")
    await page.evaluate(f"{undo}.click()")
    await page.until(f"{answering}.startsWith('version 1')")
    await page.until(f"{undo}?.textContent.startsWith('Serve version 2 again')")

    assert f"“{TWO}” is loaded, and holds" in loaded
    assert "Unload again" in loaded
    assert reloaded.startswith("Serve version 1 again: about ")
    assert [] == page.complaints


async def test_dependents_and_steps_lead_to_one_another(page: Page, server: ServerProcess) -> None:
    await show(page, server, STEP)
    await page.until("document.querySelector('#model-depends a') !== null")
    await page.evaluate("document.querySelector('#model-depends a').click()")
    await page.until(f"document.getElementById('model-name').textContent === {ENSEMBLE!r}")
    await page.until("document.querySelector('#model-depends a') !== null")

    assert f"Steps: {STEP}" in await text(page, "model-depends")
    assert f"#/models/{ENSEMBLE}" == await page.evaluate("location.hash")


@pytest.mark.slow
async def test_a_hostile_name_is_loaded_from_its_own_page(
    page: Page, server: ServerProcess
) -> None:
    name = HOSTILE.replace("/", ":")
    await show(page, server, name)
    await page.until(f"{button('load')}.checkVisibility()")
    await page.evaluate(f"{button('load')}.click()")
    await page.until("document.getElementById('confirm').open")
    await page.evaluate("document.getElementById('confirm-yes').click()")
    await state_is(page, "READY")

    assert name == await text(page, "model-name")
    assert "undefined" == await page.evaluate("typeof hacked")
    assert 0 == await page.evaluate("document.querySelectorAll('#content img').length")
    assert [] == page.complaints


async def test_a_model_that_is_nowhere_is_said_not_to_be_found(
    page: Page, server: ServerProcess
) -> None:
    page.complaints.clear()
    await page.open("about:blank")
    await page.open(address(server, "nowhere"))
    await page.until("document.getElementById('model-problem').textContent.includes('nowhere')")

    assert not await page.evaluate("document.getElementById('model-actions').checkVisibility()")


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1280, False),
        (400, True),
        pytest.param(1280, True, marks=pytest.mark.slow),
        pytest.param(400, False, marks=pytest.mark.slow),
    ],
)
async def test_axe_finds_nothing(
    page: Page, server: ServerProcess, axe: str, *, width: int, dark: bool
) -> None:
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    await show(page, server, "simple", width=width, dark=dark)
    await page.until("document.getElementById('model-config').textContent.includes('max_batch')")

    assert [] == await page.findings(axe)
    assert await page.evaluate(fits)

    await page.evaluate("location.hash = '#/events'")
    await page.until("document.querySelector('#events-list tbody tr') !== null")

    assert [] == await page.findings(axe)
    assert await page.evaluate(fits)


@pytest.mark.slow
async def test_who_may_not_is_offered_nothing(page: Page, tmp_path: Path) -> None:
    """The viewer of the page may not manage models; another caller may load them."""
    identity_models.write(tmp_path / "models", "simple", "FP32")
    other = {"name": "other", "token": digest_of(new_token()), "allow": ["manage", "metadata"]}
    anyone = {"name": "anyone", "anyone": True, "allow": ["page"]}
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"caller": [other, anyone]}))
    flags = ("--model-control-mode", "explicit", "--load-model", "simple")
    async with served(tmp_path / "models", *flags, "--access-rules", str(rules)) as restricted:
        await show(page, restricted, "simple")
        await state_is(page, "READY")
        await page.until("document.getElementById('model-config').textContent")
        config = await text(page, "model-config")
        actions = await page.evaluate("document.getElementById('model-actions').checkVisibility()")
        await page.evaluate("location.hash = '#/'")
        await page.until("document.querySelector('#model-rows .model') !== null")
        offered = await page.evaluate(
            "[...document.querySelectorAll('#model-rows button')]"
            ".filter((button) => button.checkVisibility()).length"
        )
        # The page keeps polling, and reports errors once the server is gone.
        complaints = list(page.complaints)

    assert not actions
    assert 0 == offered
    assert "You lack permission to see its configuration." == config
    assert [] == complaints


@asynccontextmanager
async def prefixed(server: ServerProcess, prefix: str) -> AsyncIterator[str]:
    """Run a proxy that serves a server only below a path prefix."""

    async def forward(request: web.Request) -> web.Response:
        path = request.raw_path.removeprefix(prefix)
        headers = {"Host": server.http}
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, f"http://{server.http}/{path}", headers=headers) as got,
        ):
            kind = {"Content-Type": got.headers["Content-Type"]}
            return web.Response(status=got.status, body=await got.read(), headers=kind)

    app = web.Application()
    app.router.add_route("*", prefix + "{rest:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    try:
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}{prefix}"
    finally:
        await runner.cleanup()


async def test_all_views_work_behind_a_prefix(page: Page, server: ServerProcess) -> None:
    """The proxy serves everything below the prefix, and nothing outside of it."""
    page.complaints.clear()
    async with prefixed(server, "/deep/er/") as url:
        await page.open(f"{url}#/models/simple")
        await state_is(page, "READY")
        await page.evaluate("location.hash = '#/'")
        await page.until("document.querySelector('#model-rows .model') !== null")
        await page.evaluate("location.hash = '#/events'")
        await page.until("document.querySelector('#events-list tbody tr') !== null")

    assert [] == page.complaints


async def test_the_overview_looks_back_with_axes_reasons_and_memory(
    page: Page, server: ServerProcess
) -> None:
    """The history is faked, since it gets only one point every ten seconds."""
    page.complaints.clear()
    await page.open("about:blank")
    await page.open(f"http://{server.http}/#content")
    interval = {
        "seconds": 10,
        "requests_per_second": 40,
        "p50_ns": 2e6,
        "p99_ns": 7e6,
        "models": [],
        "lag_mean_seconds": 0.0005,
        "lag_p99_seconds": 0.02,
        "pending": 0,
    }
    old = interval | {"at_seconds": 3000, "failures": {"Old": 1}, "requests_per_second": 700}
    new = interval | {
        "at_seconds": 3990,
        "failures": {"InvalidTensor": 3, "Overloaded": 5},
        "pending": 12,
    }
    error = {
        "at_ns": 1,
        "reason": "Overloaded",
        "operation": "infer",
        "model": "simple",
        "text": "x",
    }
    hour = {
        "now_seconds": 4000,
        "hour": [old, new],
        "errors": [error],
        "recent": [],
        "bounds_ns": [],
    }
    await page.evaluate(
        "window.real = window.real ?? fetch; performance.now = () => 1e9;"
        f"window.fetch = (path, ...rest) => path === 'history.json' ?"
        f" Promise.resolve(Response.json({json.dumps(hour)})) : real(path, ...rest); 0"
    )
    # Wait for a value of the faked history: the real rate may have the same digits.
    await page.until("document.querySelector('#over-reasons').textContent.includes('Overloaded')")
    rate = await page.evaluate("document.querySelector('#over-rate').textContent")
    latency = await page.evaluate("document.querySelector('#over-latency svg').ariaLabel")
    labels = "[...document.querySelectorAll('#over-lag svg, #over-queue svg')]"
    lag, queue = await page.evaluate(f"{labels}.map((one) => one.ariaLabel)")
    reasons = await text(page, "over-reasons")
    tiles = await page.evaluate("[...document.querySelectorAll('.tile')].map((one) => one.title)")
    link = await page.evaluate("document.querySelector('#over-errors a').getAttribute('href')")
    await page.evaluate(
        "document.getElementById('window').value = 3600;"
        "document.getElementById('window').dispatchEvent(new Event('change'))"
    )

    assert "\N{MINUS SIGN}5 min" in rate
    assert latency.endswith("p50 at most 2 ms, p99 at most 7 ms")
    assert lag.endswith("mean at most 500 µs, p99 at most 20 ms")
    assert queue.endswith("5 minutes: waiting at most 12")
    assert "Nothing is queued." == await text(page, "over-waiting")
    assert "Overloaded: 5\nInvalidTensor: 3" == reasons.strip()
    assert any(tile.startswith("simple, ") for tile in tiles)
    assert "#/models/simple" == link
    assert "Old: 1" in await text(page, "over-reasons")
    assert "1,000" in await page.evaluate("document.querySelector('#over-rate').textContent")
    assert [] == page.complaints


async def test_events_are_shown_with_who_asked_and_searched(
    page: Page, server: ServerProcess
) -> None:
    """A hostile name is shown as text; failures can be filtered; reloading the tab keeps all."""
    page.complaints.clear()
    name = HOSTILE.replace("/", ":")
    load = f"http://{server.http}/v2/repository/models"
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{load}/{quote(name, safe='')}/load") as answer:
            assert 200 == answer.status
        async with session.post(f"{load}/nowhere/load") as answer:
            assert 400 <= answer.status
        async with session.post(f"{load}/{quote(name, safe='')}/unload") as answer:
            assert 200 == answer.status
    rows = "document.querySelectorAll('#events-list tbody tr')"
    for _ in range(2):
        await page.open("about:blank")
        await page.open(f"http://{server.http}/#/events")
        await page.until(f"{rows}.length > 3")
        shown = await text(page, "events-list")
        assert name in shown
        assert "127.0.0.1" in shown
        assert "server startup" in shown
    await page.evaluate("document.getElementById('events-failed').click()")
    await page.until(f"[...{rows}].every((row) => row.innerText.includes('Load failed'))")
    await page.evaluate(
        "document.getElementById('events-search').value = 'NOWHERE';"
        "document.getElementById('events-search').dispatchEvent(new Event('input'))"
    )
    await page.until(f"{rows}.length >= 1")

    assert "nowhere" in await text(page, "events-list")
    assert "Events \N{EN DASH} xlaserve" == await page.evaluate("document.title")
    assert "undefined" == await page.evaluate("typeof hacked")
    assert [] == page.complaints


async def test_the_page_of_a_model_says_who_loaded_it(page: Page, server: ServerProcess) -> None:
    await show(page, server, "simple")
    await page.until("document.querySelector('#model-events tbody tr') !== null")

    assert "asked by server startup" in await text(page, "model-statistics")
    assert "Loaded" in await text(page, "model-events")


async def test_a_model_that_is_not_loaded_leaves_the_list_of_models_as_it_is(
    page: Page, server: ServerProcess
) -> None:
    """The model's page hides empty sections, but no section of the overview."""
    url = f"http://{server.http}/v2/repository/models/{STEP}"
    async with aiohttp.ClientSession() as session:
        for verb in ("load", "unload"):
            async with session.post(f"{url}/{verb}") as answer:
                assert 200 == answer.status
        await show(page, server, STEP)
        await state_is(page, "UNAVAILABLE")
        await page.evaluate("location.hash = '#/'")
        await page.until("document.querySelector('#model-rows .model')?.checkVisibility()")
        async with session.post(f"{url}/load") as answer:
            assert 200 == answer.status
    names = "[...document.querySelectorAll('[id]')].map((one) => one.id)"

    assert await page.evaluate(f"new Set({names}).size === {names}.length")
