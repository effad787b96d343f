"""A headless browser, driven over the DevTools protocol."""

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from support.tools import program

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60
_POLL_SECONDS = 0.05
_PORT_FILE = "DevToolsActivePort"

_FLAGS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
    # Root and most containers cannot use the sandbox; the browser opens only our own pages.
    "--no-sandbox",
)


class PageError(AssertionError):
    """Evaluated JavaScript raised an exception, or the browser rejected a command."""


@dataclass
class Page:
    """One browser tab, and the errors that occurred in it."""

    socket: aiohttp.ClientWebSocketResponse
    complaints: list[str] = field(default_factory=list)
    """Exceptions, console errors, and violations of the content security policy."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _answers: dict[int, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(SECONDS):
            result: dict[str, Any] = await answer
        return result

    async def listen(self) -> None:
        """Dispatch responses to their commands, and record errors."""
        async for message in self.socket:
            data = message.json()
            if "id" not in data:
                self._note(data["method"], data["params"])
                continue
            answer = self._answers.pop(data["id"])
            if "error" in data:
                answer.set_exception(PageError(data["error"]["message"]))
            else:
                answer.set_result(data["result"])

    def _note(self, event: str, facts: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            self.complaints.append(thrown)
        elif event == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.complaints.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "assert"):
            self.complaints.append(str(facts["args"]))

    async def open(self, url: str, *, width: int = 1280, dark: bool = False) -> None:
        """Open a URL in a window of the given width."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        problem = (await self.send("Page.navigate", url=url)).get("errorText")
        assert not problem, f"{url}: {problem}"
        # For a moment the previous document is still the current one.
        await self.until(f"document.readyState === 'complete' && location.href === {url!r}")

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaiting it if it is a promise."""
        result = await self.send(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in result:
            raise PageError(result["exceptionDetails"].get("exception", result))
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is truthy, and return its value."""
        try:
            async with asyncio.timeout(SECONDS):
                while not (value := await self.evaluate(expression)):
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise AssertionError(f"never true in the page: {expression}") from None
        return value

    async def findings(self, axe: str) -> list[str]:
        """Return the accessibility problems that axe-core, passed as source text, finds in
        the page.
        """
        await self.evaluate(f"{axe};0")
        found: list[str] = await self.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(({violations}) =>"
            " violations.flatMap(({id, nodes}) => nodes.map(({target, failureSummary}) =>"
            " `${id}: ${target} ${failureSummary}`)))"
        )
        return found

    async def screenshot(self, file: Path) -> None:
        """Save a screenshot as PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Page]:
    """Run a browser with one tab for the duration of a block, with its profile in this folder."""
    process = await asyncio.create_subprocess_exec(
        program(*PROGRAMS),
        *_FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            url = await _tab(session, await _port(process, profile / _PORT_FILE))
            async with session.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await page.send(f"{domain}.enable")
                yield page
                with suppress(ConnectionError):
                    await socket.send_json({"id": -1, "method": "Browser.close"})
                listening.cancel()
        async with asyncio.timeout(SECONDS):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _port(process: asyncio.subprocess.Process, file: Path) -> int:
    async with asyncio.timeout(SECONDS):
        while not (file.exists() and file.read_text().strip()):
            assert process.returncode is None, "the browser ended at once"
            await asyncio.sleep(_POLL_SECONDS)
    return int(file.read_text().splitlines()[0])


async def _tab(session: aiohttp.ClientSession, port: int) -> str:
    async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = await answer.json()
    return next(str(tab["webSocketDebuggerUrl"]) for tab in tabs if tab["type"] == "page")
