"""The status pages in a real browser, including models with hostile names."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from support import identity_models
from support.browser import Page, browsing
from support.process import ServerProcess, served

HOSTILE = "<img src=x onerror=hacked=1>"
NAMES = (HOSTILE, "two words", "naïve-模型", "q'\"&<b>?#%41+;", "${alert(1)}")
FEW_REQUESTS = 5
MANY = 5000
EXPECTED_REFUSAL = "the server responded with a status of"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Site:
    """A server, and a browser tab that shows its page."""

    server: ServerProcess
    page: Page

    @property
    def url(self) -> str:
        """The address of the status page."""
        return f"http://{self.server.http}/"

    async def infer(self, model: str = "simple") -> None:
        """Run one inference."""
        tensor = {"datatype": "INT32", "shape": [1, 16], "data": [1] * 16}
        inputs = [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]
        async with aiohttp.ClientSession() as session:
            url = f"{self.url}v2/models/{model}/infer"
            async with session.post(url, json={"inputs": inputs}) as answer:
                assert 200 == answer.status, await answer.text()

    async def fail(self) -> None:
        """Run one inference that fails."""
        async with aiohttp.ClientSession() as session:
            url = f"{self.url}v2/models/simple/infer"
            async with session.post(url, json={"inputs": []}) as answer:
                assert 400 == answer.status, await answer.text()

    async def load(self, model: str) -> None:
        """Try to load a model."""
        async with aiohttp.ClientSession() as session:
            url = f"{self.url}v2/repository/models/{model}/load"
            async with session.post(url) as answer:
                await answer.read()


def row(model: str) -> str:
    """Return a JavaScript expression for the row of a model."""
    return (
        "[...document.querySelectorAll('#model-rows tr')]"
        f".find((row) => row.querySelector('.model').textContent === {json.dumps(model)})"
    )


def state(model: str) -> str:
    return f"{row(model)}?.dataset.state"


def press(model: str, verb: str) -> str:
    return f"{row(model)}.querySelector('[data-verb={verb}]').click()"


async def seek(page: Page, text: str) -> None:
    """Filter the rows by name, because rows outside the viewport are not in the DOM."""
    await page.evaluate(
        f"document.getElementById('search').value = {json.dumps(text)};"
        "document.getElementById('search').dispatchEvent(new Event('input'))"
    )


CONFIRM = "document.getElementById('confirm')"


async def order(page: Page, model: str, verb: str) -> str:
    """Click a button of a model and confirm; return the text of the confirmation."""
    await page.evaluate(press(model, verb))
    await page.until(f"{CONFIRM}.open")
    said: str = await page.evaluate(f"{CONFIRM}.innerText")
    await page.evaluate("document.getElementById('confirm-yes').click()")
    return said


@pytest.fixture(scope="module", name="repository")
def _repository(tmp_path_factory: pytest.TempPathFactory, example_models: Path) -> Path:
    """Some models, one that cannot be loaded, and thousands of others."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(example_models / "simple", root / "simple", dirs_exist_ok=True)
    for name in (*NAMES, "one", "other"):
        shutil.copytree(example_models / "identity" / "1", root / name / "1")
    (root / "broken" / "1").mkdir(parents=True)
    for number in range(MANY):
        (root / f"many-{number:04}").mkdir()
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="browser")
async def _browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    async with browsing(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(repository: Path) -> AsyncIterator[ServerProcess]:
    flags = ("--model-control-mode", "explicit", "--load-model", "simple", "--load-model", "other")
    async with served(repository, *flags) as server:
        yield server


@pytest.fixture
def site(server: ServerProcess, browser: Page) -> Site:
    """Clients may load and unload; `simple` and `other` are loaded."""
    browser.complaints.clear()
    return Site(server, browser)


@pytest.mark.slow
async def test_models_are_loaded_and_unloaded_by_a_press(site: Site, tmp_path: Path) -> None:
    page = site.page
    await page.open(site.url)
    await seek(page, "one")
    await page.until(f"{state('one')} === 'UNAVAILABLE'")
    await order(page, "one", "load")
    await page.until(f"{state('one')} === 'READY'")
    size = await page.evaluate(f"{row('one')}.querySelector('.size').textContent")
    await seek(page, "other")
    await page.until(f"{state('other')} === 'READY'")
    await order(page, "other", "unload")
    await page.until(f"{state('other')} === 'UNAVAILABLE'")
    await page.screenshot(tmp_path / "status.png")

    assert "iB" in size
    assert [] == page.complaints


@pytest.mark.slow
async def test_names_are_text_and_nothing_else(site: Site) -> None:
    page = site.page
    await page.open(site.url)
    for name in NAMES:
        await seek(page, name)
        await page.until(f"{state(name)} === 'UNAVAILABLE'")
        await order(page, name, "load")
        await page.until(f"{state(name)} === 'READY'")
        await order(page, name, "unload")
        await page.until(f"{state(name)} === 'UNAVAILABLE'")

    assert [] == page.complaints
    assert 0 == await page.evaluate("document.querySelectorAll('#models img, #models b').length")
    assert "undefined" == await page.evaluate("typeof hacked")


async def test_what_a_name_would_run_the_policy_forbids(site: Site) -> None:
    """Even if a name were treated as HTML, the content security policy would block it."""
    page = site.page
    await page.open(site.url)
    await page.evaluate(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(HOSTILE)})")
    await page.until("document.querySelector('body > img').complete")

    assert "undefined" == await page.evaluate("typeof hacked")
    assert any("Content Security Policy" in text for text in page.complaints)


async def test_charts_and_numbers_follow_inferences(site: Site, tmp_path: Path) -> None:
    page = site.page
    await page.open(site.url)
    await seek(page, "simple")
    await page.until(f"{state('simple')} === 'READY'")
    asking = asyncio.create_task(ask_on(site))  # the displayed numbers cover the last second
    try:
        await page.until(f"/\\/s.*s, /s.test({row('simple')}.innerText)")  # rate, p50 and p99
    finally:
        asking.cancel()
    drawn = f"{row('simple')}.querySelector('.rate .line').getAttribute('d')"
    await page.until(f"{drawn}?.startsWith('M')")
    await page.until("document.querySelector('#rate-chart .line').getAttribute('d')")
    await page.until("document.querySelector('#latency-chart .line').getAttribute('d')")
    await page.screenshot(tmp_path / "charts.png")

    assert [] == page.complaints


async def ask_on(site: Site) -> None:
    while True:
        await site.infer()
        await asyncio.sleep(0.01)


async def test_a_page_that_is_loaded_again_has_lost_nothing(site: Site) -> None:
    """Earlier rates come from the server: no request is sent after the page has been opened."""
    page = site.page
    for _ in range(FEW_REQUESTS):
        await site.infer()
    for _ in range(2):
        await page.open(site.url)
        await page.until("document.querySelector('#rate-top').textContent.startsWith('at most')")
        await seek(page, "simple")
        await page.until(f"{row('simple')}?.dataset.idle === 'false'")

    assert [] == page.complaints


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([0, 4, 0], 0.5, 15),  # interpolated between the bounds of its bucket
        ([4, 0, 0], 0.25, 2.5),
        ([1, 1, 2], 0.99, 20),  # beyond the last bound: nothing more precise is known
        ([0, 0, 0], 0.5, None),
        ([], 0.5, None),
    ],
)
async def test_latencies_are_read_from_histograms(
    site: Site, buckets: list[int], share: float, expected: float | None
) -> None:
    await site.page.open(site.url)
    read = f"import('./page/history.js').then((m) => m.quantile({buckets}, [10, 20], {share}))"

    assert expected == await site.page.evaluate(read)


ALL_ROWS = f"Number(document.getElementById('models').getAttribute('aria-rowcount')) > {MANY}"


@pytest.mark.slow
async def test_five_thousand_rows_are_updated_within_a_frame_or_three(site: Site) -> None:
    """The time is printed but not asserted, because machines are shared."""
    page = site.page
    await page.open(site.url)
    await page.until(ALL_ROWS)
    await page.send("Performance.enable")
    before = await _script_seconds(page)
    asked = "performance.getEntriesByType('resource').filter((e) => e.name.includes('json')).length"
    first = await page.evaluate(asked)
    last = await page.until(f"{asked} >= {first} + 1 && {asked}")
    spent = await _script_seconds(page) - before
    print(f"{1000 * spent / (last - first):.1f} ms for an update of {MANY} rows")

    assert [] == page.complaints


async def _script_seconds(page: Page) -> float:
    metrics = {
        m["name"]: m["value"] for m in (await page.send("Performance.getMetrics"))["metrics"]
    }
    return float(metrics["TaskDuration"])


@pytest.mark.slow
async def test_a_load_that_fails_says_why_until_it_is_dismissed(site: Site) -> None:
    page = site.page
    await page.open(site.url)
    await seek(page, "broken")
    await page.until(state("broken"))  # another test may have tried to load it
    await order(page, "broken", "load")
    told = await page.until("document.querySelector('#problems')?.textContent.trim()")
    await page.until(f"{state('broken')} === 'FAILED'")
    await page.evaluate("document.querySelector('#problems button').click()")

    assert "load of “broken”: failed to load 'broken'" in told
    assert not await page.evaluate("document.querySelector('#problems').textContent.trim()")
    assert all(EXPECTED_REFUSAL in text for text in page.complaints)


@pytest.mark.slow
async def test_no_buttons_where_clients_may_not_load_and_no_answer_of_who_is_gone(
    browser: Page, tmp_path: Path
) -> None:
    identity_models.write(tmp_path, "simple", "FP32")
    async with served(tmp_path) as server:
        await browser.open(f"http://{server.http}/")
        await browser.until(f"{state('simple')} === 'READY'")
        buttons = await browser.evaluate(
            "[...document.querySelectorAll('#model-rows button')]"
            ".filter((button) => button.checkVisibility()).length"
        )
        await server.stop()
        await browser.until("document.getElementById('live').textContent === 'no answer'")

    assert 0 == buttons
    assert "false" == await browser.evaluate("document.getElementById('live').dataset.is")


@pytest.mark.slow
async def test_workers_without_a_part_in_what_is_shown_are_counted_with_their_reasons(
    site: Site,
) -> None:
    page = site.page
    await page.open(site.url)
    await seek(page, "simple")
    await page.until(f"{state('simple')} === 'READY'")
    unseen = await page.evaluate("document.getElementById('missing').hidden")
    await page.evaluate(
        "const real = window.fetch; window.fetch = async (...asked) => {"
        " const body = await (await real(asked[0])).json();"
        " return Response.json({...body, missing: {1: 'no answer within 5 s'}}); }; 0"
    )
    await page.until("!document.getElementById('missing').hidden")
    pill = "document.getElementById('missing')"

    assert unseen
    assert "without 1 worker" == await page.evaluate(f"{pill}.textContent")
    assert "1: no answer within 5 s" == await page.evaluate(f"{pill}.title")


SHOWN = "[...document.querySelectorAll('#model-rows .model')].map((one) => one.textContent)"


async def test_five_thousand_models_are_scrolled_with_few_rows_in_the_document(site: Site) -> None:
    page = site.page
    await page.open(site.url)
    await page.until(ALL_ROWS)
    top = await page.evaluate(SHOWN)
    await page.evaluate("scrollTo(0, document.documentElement.scrollHeight / 2)")
    middle = await page.until(f"({SHOWN}).some((one) => one.startsWith('many-2')) && {SHOWN}")
    height = await page.evaluate("document.documentElement.scrollHeight")
    await page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    # Names are sorted by their UTF-8 bytes, so this one comes last.
    await page.until(f"({SHOWN}).includes('two words')")
    await seek(page, "many-0999")
    await page.until(f"({SHOWN}).length === 1")

    assert 60 > max(len(top), len(middle))
    assert 50 * MANY < height
    assert not set(top) & set(middle)
    assert [] == page.complaints


async def test_memory_of_five_thousand_models_is_drawn_in_few_tiles_within_their_map(
    site: Site,
) -> None:
    """The status is faked: one large model, and thousands that are too small for a tile."""
    page = site.page
    await page.open(site.url)
    await page.until(ALL_ROWS)
    await page.evaluate(
        "const played = window.fetch; window.fetch = async (...asked) => {"
        # Without a tag: the server would answer that nothing has changed.
        " const body = await (await played(asked[0])).json();"
        " if (body.models) body.models = ["
        f"  ...Array.from({{length: {MANY}}}, (_, at) =>"
        "   ({name: `small-${at}`, state: 'READY', version: '1', size_bytes: 1000 + at})),"
        "  {name: 'large', state: 'READY', version: '1', size_bytes: 1e7}];"
        " return Response.json(body); }; 0"
    )
    tiles = "[...document.querySelectorAll('.treemap .tile')]"
    await page.until(f"{tiles}.some((one) => one.title.startsWith('large'))")
    names = await page.evaluate(f"{tiles}.map((one) => one.innerText.split('\\n')[0])")
    inside = await page.evaluate(
        f"{tiles}.every((one) => {{ const [tile, map] = [one, one.parentElement]"
        ".map((each) => each.getBoundingClientRect());"
        " return tile.right <= map.right + 1 && tile.bottom <= map.bottom + 1; })"
    )

    assert ["large", f"{MANY:,} smaller models"] == sorted(names, reverse=True)
    assert inside


@pytest.mark.parametrize(
    "column",
    [
        "name",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("state", "size", "rate", "latency", "errors")
        ),
    ],
)
async def test_any_column_sorts(site: Site, column: str) -> None:
    """One model has the largest size, and the only requests, latencies and errors."""
    page = site.page
    await page.open(site.url)
    await page.until(ALL_ROWS)
    await site.fail()
    heads = "document.querySelector('#models thead"
    await page.evaluate(f"{heads} [data-column={column}]').click()")
    first = {"name": "${alert(1)}", "state": "broken"}.get(column, "simple")
    asking = asyncio.create_task(ask_on(site))
    try:
        await site.load("broken")
        if column == "size":  # several models are loaded
            await page.until("document.querySelector('#model-rows .size').textContent")
        else:
            await page.until(f"({SHOWN})[0] === {json.dumps(first)}")
    finally:
        asking.cancel()
    sorted_by = await page.evaluate(f"{heads} [aria-sort$=ending] button').dataset.column")

    assert column == sorted_by


async def test_only_failed_models_are_shown_where_that_is_wanted(site: Site) -> None:
    page = site.page
    await site.load("broken")
    await page.open(site.url)
    await page.until(ALL_ROWS)
    await page.evaluate("document.getElementById('failed').click()")
    await page.until(f"({SHOWN}).length === 1")

    assert ["broken"] == await page.evaluate(SHOWN)
    assert "1 of" in await page.evaluate("document.getElementById('shown').textContent")


async def test_what_failed_comes_first_with_its_reason(site: Site) -> None:
    page = site.page
    await site.load("broken")
    await page.open(site.url)
    await page.until("document.getElementById('failing').checkVisibility()")
    said: str = await page.evaluate("document.getElementById('failing').innerText")
    reason: str = await page.evaluate(f"{row('broken')}.querySelector('.reason').textContent")
    above = await page.evaluate(
        "document.getElementById('failing').getBoundingClientRect().bottom"
        " <= document.querySelector('.cards').getBoundingClientRect().top"
    )

    assert "failed to load 'broken'" in reason
    assert ["1 model failed", "broken 1", reason] == [line.strip() for line in said.splitlines()]
    assert above
    link = "document.querySelector('#failing-list a').getAttribute('href')"
    assert "#/models/broken" == await page.evaluate(link)


OFFERED = (
    "[...document.querySelectorAll('#model-rows [data-verb]')]"
    ".filter((one) => one.checkVisibility({visibilityProperty: true})).length"
)


async def test_a_server_that_is_gone_is_said_and_offers_nothing(site: Site) -> None:
    page = site.page
    await page.open(site.url)
    await page.until(f"{OFFERED} > 0")
    await page.evaluate(
        "window.asked = window.fetch.bind(window);"
        "window.fetch = () => Promise.reject(new Error('nobody is there'))"
    )
    await page.until("document.getElementById('gone').checkVisibility()")
    said: str = await page.evaluate("document.getElementById('gone').textContent")
    offered = await page.evaluate(OFFERED)
    await page.evaluate("window.fetch = window.asked")
    await page.until("!document.getElementById('gone').checkVisibility()")

    assert re.match(r"No answer since \w+ \d+, \d\d:\d\d:\d\d \S+: nobody is there\.", said), said
    assert 0 == offered
    assert 0 < await page.evaluate(OFFERED)


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1280, False),
        (400, True),
        pytest.param(1280, True, marks=pytest.mark.slow),
        pytest.param(400, False, marks=pytest.mark.slow),
    ],
)
async def test_axe_finds_nothing_in_the_overview(
    site: Site, axe: str, *, width: int, dark: bool
) -> None:
    await site.infer()
    await site.page.open(site.url, width=width, dark=dark)
    await site.page.until(ALL_ROWS)

    assert [] == await site.page.findings(axe)
    assert await site.page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )


@pytest.mark.slow
async def test_a_hidden_page_asks_nothing(site: Site) -> None:
    page = site.page
    await page.open(site.url)
    await seek(page, "simple")
    await page.until(f"{state('simple')} === 'READY'")
    asked = "performance.getEntriesByType('resource').filter((e) => e.name.includes('json')).length"
    await page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    before = await page.evaluate(f"fetch('v2').then(() => {asked})")
    await page.evaluate("new Promise((resolve) => setTimeout(resolve, 2500))")
    quiet = await page.evaluate(asked)
    await page.evaluate(
        "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
    )
    await page.until(f"{asked} > {quiet}")

    assert quiet - before <= 1  # the request that was already in flight


async def test_the_documentation_names_this_server_and_tries_routes(
    site: Site, tmp_path: Path
) -> None:
    page = site.page
    await page.open(f"{site.url}v2/docs")
    form = "document.querySelector('#get_v2_models_by_model form')"
    await page.evaluate(f"{form}.querySelector('input').value = 'simple'")
    await page.evaluate(f"{form}.querySelector('button').click()")
    answer = await page.until(f"{form}.querySelector('.answer pre')?.textContent")
    await page.screenshot(tmp_path / "docs.png")

    assert "simple" == json.loads(answer)["name"]
    assert site.url.rstrip("/") == await page.evaluate(
        "document.querySelector('.origin').textContent"
    )
    assert [] == page.complaints


@pytest.mark.parametrize("path", ["", "v2/docs"])
async def test_pages_fit_a_phone_in_the_dark(site: Site, path: str) -> None:
    page = site.page
    await page.open(site.url + path, width=380, dark=True)
    if not path:
        await seek(page, "simple")
        await page.until(f"{state('simple')} === 'READY'")

    assert await page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert [] == page.complaints
