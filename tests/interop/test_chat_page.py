"""A generator with a hostile name; half of its tokens are HTML markup."""

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from support import tiny_chat, tiny_language
from support.browser import Page
from support.process import run
from support.server import RunningServer, serving
from tokenizers import Tokenizer

from xlaserve.openai.calls import ChoiceCall

MARKUP = "<img src=x onerror=hacked={}>"
CHAT = MARKUP.format("'name'")
"""A generator with a hostile name, half of whose tokens are markup."""
PLAIN = "plain"
"""A generator without a chat template."""
READABLE = "helo"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def write_models(root: Path) -> None:
    hostile = tiny_chat.export(root / CHAT) / "1" / "tokenizer.json"
    written = json.loads(hostile.read_text())
    vocabulary = written["model"]["vocab"]
    for letter in set(tiny_chat.LETTERS) - set(READABLE):
        number = vocabulary.pop(letter)
        vocabulary[MARKUP.format(number)] = number
    hostile.write_text(json.dumps(written))
    assert Tokenizer.from_file(str(hostile)).get_vocab_size() == tiny_language.VOCAB
    tiny_chat.export(root / PLAIN)
    (root / PLAIN / "1" / "tokenizer_config.json").unlink()


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="server")
async def _server(
    tmp_path_factory: pytest.TempPathFactory, programs: str
) -> AsyncIterator[RunningServer]:
    folder = tmp_path_factory.mktemp("chat")
    write_models(folder / "models")
    running = serving(
        folder,
        folder / "models",
        load_model=(CHAT, PLAIN),
        http_endpoint="port:0",
        compilation_cache_directory=programs,
    )
    async with running as server:
        yield server


async def show(page: Page, server: RunningServer, model: str, **window: Any) -> None:
    """Open the page of a generator, wait for its text box, and request the likely tokens."""
    page.complaints.clear()
    await page.open("about:blank")
    await page.open(f"http://{server.http}/#/models/{quote(model, safe='')}", **window)
    await page.until("document.getElementById('chat-code').checkVisibility()")
    await type_in(page, "chat-temperature", "0")


async def type_in(page: Page, field: str, text: str) -> None:
    await page.evaluate(
        f"{{const field = document.getElementById({field!r}); field.value = {json.dumps(text)};"
        " field.dispatchEvent(new Event('input', {bubbles: true}))}"
    )


async def send(page: Page, text: str) -> None:
    await type_in(page, "chat-text", text)
    await page.evaluate("document.querySelector('#chat-form [type=submit]').click()")


async def text(page: Page, part: str) -> str:
    shown: str = await page.evaluate(f"document.getElementById({part!r}).innerText")
    return shown


async def status_is(page: Page, words: str) -> None:
    await page.until(f"document.getElementById('chat-status').textContent.includes({words!r})")


async def test_a_chat_goes_on_and_markup_that_a_model_writes_is_text(
    page: Page, server: RunningServer, axe: str
) -> None:
    """An answer becomes part of the next request; the example call contains all messages."""
    await show(page, server, CHAT, width=400, dark=True)
    await type_in(page, "chat-system", "hole")
    await send(page, "hello")
    await status_is(page, "answer")
    answers = "[...document.querySelectorAll('#chat-log .words')].map((one) => one.textContent)"
    said, answer = await page.evaluate(answers)
    pace = await text(page, "chat-pace")
    await type_in(page, "chat-text", "again <b>")
    call = await text(page, "chat-code")
    findings = await page.findings(axe)

    assert "hello" == said
    assert "<img src=x onerror=hacked=" in answer
    assert "first token after" in pace
    assert "tokens/s" in pace
    body = json.loads(call.partition("-d '")[2].partition("' \\")[0].replace("'\\''", "'"))
    assert CHAT == body["model"]
    assert [
        ("system", "hole"),
        ("user", "hello"),
        ("assistant", answer),
        ("user", "again <b>"),
    ] == [(one["role"], one["content"]) for one in body["messages"]]
    assert 0 == body["temperature"]
    assert "undefined" == await page.evaluate("typeof hacked")
    assert 0 == await page.evaluate("document.querySelectorAll('#content img').length")
    assert [] == findings
    assert await page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert [] == page.complaints


async def test_stop_frees_the_slot_which_the_page_shows_in_use(
    page: Page, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = server.application.registry.resolve(CHAT)[1].runner
    step, cancel, may_go_on = runner._programs.step, ChoiceCall.cancel, threading.Event()
    steps: list[int] = []
    cancelled = asyncio.Event()

    def held(*arguments: Any, **slots: Any) -> Any:
        steps.append(0)
        if len(steps) > 2:
            may_go_on.wait(30)
        return step(*arguments, **slots)

    def noted(call: ChoiceCall, reason: str) -> None:
        cancelled.set()
        cancel(call, reason)

    await show(page, server, CHAT)
    monkeypatch.setattr(runner._programs, "step", held)
    monkeypatch.setattr(ChoiceCall, "cancel", noted)
    used = "document.getElementById('slots-used').textContent"
    try:
        await send(page, "hello")
        await page.until(f"{used} === '1 of 4'")
        positions = await text(page, "positions-used")
        await page.evaluate("document.getElementById('chat-stop').click()")
        async with asyncio.timeout(20):
            await cancelled.wait()
    finally:
        may_go_on.set()
    await status_is(page, "Stopped.")
    await page.until(f"{used} === '0 of 4'")

    assert "0 of 256" != positions
    assert positions.endswith(" of 256")
    assert 4 >= len(steps)
    assert not await page.evaluate("document.getElementById('chat-stop').checkVisibility()")


async def test_a_text_goes_on_where_there_is_no_template_and_errors_are_said(
    page: Page, server: RunningServer
) -> None:
    """A rejected input stays in the form for editing."""
    await show(page, server, PLAIN)
    await send(page, "a" * 65)
    await status_is(page, "1 to 64 tokens")
    kept = await page.evaluate("document.getElementById('chat-text').value")
    await type_in(page, "chat-tokens", "3")
    await send(page, "hello")
    await status_is(page, "cut at the token limit")

    assert "a" * 65 == kept
    assert "3 tokens" in await text(page, "chat-pace")
    assert not await page.evaluate("document.getElementById('chat-system').checkVisibility()")
    assert "/v1/completions'" in await text(page, "chat-code")


@pytest.mark.slow
async def test_the_calls_to_copy_run_as_they_are(page: Page, server: RunningServer) -> None:
    await show(page, server, PLAIN)
    await type_in(page, "chat-text", "hello'")
    await page.evaluate("document.getElementById('chat-temperature').value = '0'")
    await type_in(page, "chat-tokens", "4")
    curl = await text(page, "chat-code")
    await page.evaluate(
        "document.getElementById('chat-language').value = 'Python';"
        "document.getElementById('chat-language').dispatchEvent(new Event('change'))"
    )
    python = await text(page, "chat-code")
    code, out, _ = await run("sh", "-c", curl)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        await asyncio.to_thread(exec, compile(python, "copied", "exec"), {})
    chunks = [line.removeprefix("data: ") for line in out.splitlines() if line]
    told = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1]]

    assert (0, "[DONE]") == (code, chunks[-1])
    assert "".join(told)
    assert "".join(told) == printed.getvalue()
