"""The API documentation page in a browser: every operation works, also by keyboard."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from support.browser import Page, browsing
from support.process import served

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@dataclass
class Site:
    """A server, and a browser tab that shows its page."""

    url: str
    page: Page


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="opened")
async def _opened(
    tmp_path_factory: pytest.TempPathFactory, example_models: Path
) -> AsyncIterator[Site]:
    flags = ("--model-control-mode", "explicit", "--load-model", "identity")
    async with served(example_models, *flags) as server:
        async with browsing(tmp_path_factory.mktemp("profile")) as page:
            yield Site(f"http://{server.http}/", page)


@pytest.fixture
def site(opened: Site) -> Site:
    """The site, after clearing earlier browser errors."""
    opened.page.complaints.clear()
    return opened


async def test_the_documentation_sends_bodies_and_shows_every_kind_of_answer(site: Site) -> None:
    page = site.page
    await page.open(f"{site.url}v2/docs")

    async def sent(operation: str, **values: str) -> str:
        form = f"document.querySelector('#{operation} form')"
        for selector, value in values.items():
            name = {"model": "[name=model]"}.get(selector, f"[data-in={selector}]")
            await page.evaluate(f"{form}.querySelector('{name}').value = {json.dumps(value)}")
        await page.evaluate(f"{form}.querySelector('button').click()")
        shown = f"{form}.querySelector('.answer p + *')?.outerHTML"
        return str(await page.until(shown))

    load = await sent("post_v2_repository_models_by_model_load", model="simple", body="{}")
    # The form's body is the example from the documentation.
    answer = await sent("post_v2_models_by_model_infer", model="identity")
    refused = await sent("post_v2_logging", body='{"nothing": 1}')
    saved = await sent("get_v2_docs_protos_zip")

    assert load.endswith("{}</pre>")
    assert '"model_name": "identity"' in answer
    assert "nothing" in refused
    assert re.fullmatch(r'<a href="blob:[^"]+" download="answer">Save \d+ bytes</a>', saved)
    # The browser reports the rejected request itself.
    assert [] == [one for one in page.complaints if "400" not in one]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (380, True)])
async def test_the_documentation_is_for_everybody(
    site: Site, axe: str, *, width: int, dark: bool
) -> None:
    await site.page.open(f"{site.url}v2/docs", width=width, dark=dark)

    assert [] == await site.page.findings(axe)


async def test_keys_reach_the_documentation_in_reading_order(site: Site) -> None:
    """The focus order follows the order of the document."""
    await site.page.open(f"{site.url}v2/docs")
    first = await site.page.evaluate(
        "[...document.querySelectorAll('a[href], button, input, select, textarea, [tabindex]')]"
        ".slice(0, 3).map((element) => element.textContent.trim().slice(0, 14))"
    )

    assert "To the content" == first[0]
    assert not await site.page.evaluate("document.querySelectorAll('[tabindex=\"1\"]').length")
