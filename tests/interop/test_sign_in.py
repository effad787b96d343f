"""Signing in on the page with a token, in a real browser: what a tenant sees and keeps."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support import identity_models
from support.browser import Page
from support.process import ServerProcess, served

from xlaserve.serving.access.tokens import digest_of, new_token

OWN, OTHER = "a-one", "b-one"
TENANT, MACHINE = new_token(), new_token()
SAID = "document.getElementById('sign-in-said').textContent"
ASKS = "document.getElementById('sign-in').checkVisibility()"
NAMES = "[...document.querySelectorAll('#model-rows .model')].map((one) => one.textContent)"
KEPT = "[sessionStorage.length, localStorage.length, document.cookie.length]"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tenants")
    for name in (OWN, OTHER):
        identity_models.write(folder / "models", name, "FP32")
    allow = ["infer", "metadata", "page"]
    tenant = {"name": "a", "token": digest_of(TENANT), "allow": allow, "models": "a-*"}
    machine = {"name": "machine", "token": digest_of(MACHINE), "allow": ["metrics"]}
    rules = folder / "rules.json"
    rules.write_text(json.dumps({"caller": [tenant, machine]}))
    async with served(folder / "models", "--access-rules", str(rules)) as server:
        yield server


async def start(page: Page, server: ServerProcess, *, width: int = 1280) -> None:
    """Open the page in a tab that was never signed in."""
    await page.open(f"http://{server.http}/page/icon.svg")
    await page.evaluate("sessionStorage.clear()")
    await page.open(f"http://{server.http}/", width=width)


async def sign_in(page: Page, token: str) -> None:
    await page.until(ASKS)
    await page.evaluate(
        f"document.getElementById('token').value = {token!r};"
        "document.getElementById('sign-in').requestSubmit()"
    )


async def test_a_tenant_signs_in_sees_its_models_and_signs_out(
    page: Page, server: ServerProcess
) -> None:
    """Only this tab's session storage has the token; signing out leaves nothing on the page."""
    url = f"http://{server.http}/"
    await start(page, server)
    await sign_in(page, TENANT)
    await page.until(f"{NAMES}.length")
    shown, asks = await page.evaluate(f"[{NAMES}, {ASKS}]")
    counted = await page.evaluate("document.querySelector('.stack').innerText")
    untokened = await page.evaluate("document.querySelector('.untokened').checkVisibility()")
    kept = await page.evaluate(KEPT)
    await page.open("about:blank")
    await page.open(f"{url}#/models/{OWN}")
    await page.until("document.getElementById('try').checkVisibility()")
    await page.evaluate("document.getElementById('try-form').requestSubmit()")
    await page.until("document.getElementById('try-outputs').children.length")
    code = await page.evaluate("document.getElementById('try-code').textContent")
    await page.evaluate(f"location.hash = '#/models/{OTHER}'")
    await page.until(f"document.getElementById('model-problem').textContent.includes({OTHER!r})")
    await page.evaluate("window.before = true; document.getElementById('sign-out').click()")
    await page.until(f"!window.before && document.readyState === 'complete' && {ASKS}")

    assert [OWN] == shown
    assert not asks
    assert "ready of 1" in counted
    assert not untokened
    assert [1, 0, 0] == kept
    assert "Bearer $TOKEN" in code
    assert TENANT not in code
    assert [0, 0, 0] == await page.evaluate(KEPT)
    assert "Sign in to see your models." == await page.evaluate(SAID)
    assert OWN not in await page.evaluate("document.getElementById('model-rows').textContent")


async def test_who_signs_in_after_another_sees_nothing_of_it(
    page: Page, server: ServerProcess
) -> None:
    """The token expires, and the page is reloaded for the next user."""
    await start(page, server)
    await sign_in(page, TENANT)
    await page.until(f"{NAMES}.length")
    await page.evaluate(
        "window.before = true; window.fetch = async () => new Response('{}', {status: 401}); 0"
    )
    await page.until(ASKS)
    await sign_in(page, TENANT)
    await page.until(f"!window.before && {NAMES}.length")

    assert not await page.evaluate(ASKS)


async def test_a_token_is_kept_by_the_page_where_the_browser_keeps_nothing(
    page: Page, server: ServerProcess
) -> None:
    await start(page, server)
    await page.evaluate(
        "Object.defineProperty(window, 'sessionStorage',"
        " {get() { throw new DOMException('blocked', 'SecurityError'); }}); 0"
    )
    await sign_in(page, TENANT)
    await page.until(f"{NAMES}.length")

    assert not await page.evaluate(ASKS)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (new_token(), "401: the server does not know this token"),
        (MACHINE, "403: caller 'machine' may not page: have the operator allow it"),
        ("not\N{BULLET}a token", "copy it again"),
    ],
    ids=["unknown", "refused", "unsendable"],
)
async def test_a_token_that_does_not_do_is_said_to_be_so_and_why(
    page: Page, server: ServerProcess, token: str, said: str
) -> None:
    await start(page, server)
    await sign_in(page, token)
    await page.until(f"{SAID}.includes({json.dumps(said)})")

    assert await page.evaluate(ASKS)
    assert not await page.evaluate("document.getElementById('overview').checkVisibility()")


async def test_axe_finds_nothing_in_the_form(page: Page, server: ServerProcess, axe: str) -> None:
    await start(page, server, width=400)
    await page.until(f"{ASKS} && document.activeElement.id === 'token'")

    assert [] == await page.findings(axe)
    assert await page.evaluate(FITS)
