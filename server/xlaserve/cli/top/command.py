"""`xlaserve top`: live rates of models, from consecutive statistics."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import Annotated

import typer

from xlaserve.cli.asking.connection import Reach, ask_server, reaching
from xlaserve.cli.asking.model_facts import model_facts
from xlaserve.cli.printable import printable
from xlaserve.cli.sizes import format_bytes
from xlaserve.cli.terminal import Terminal
from xlaserve.cli.termination import SIGNALLED
from xlaserve.cli.top.rates import rates
from xlaserve.cli.top.screen import frame, table
from xlaserve.cli.top.view import Key, View
from xlaserve.dialing.interface import CallFailed, Json, ServerClient

_ASK_SECONDS = 30.0
_METRICS: Mapping[str, str] = {
    "xlaserve_capacity_used_bytes": "models",
    "xlaserve_capacity_bytes": "of",
    "xlaserve_held_bytes": "held for clients",
}
"""Metrics shown in the first line, and their captions."""


@reaching(_ASK_SECONDS)
def top(
    reach: Reach,
    sort: Annotated[Key, typer.Option("--sort", help="Column to sort by.")] = Key.RATE,
    interval: Annotated[
        float, typer.Option("--interval", min=0.05, help="Seconds between polls.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
) -> None:
    """Show live request rates, latencies and memory per model; q or Ctrl-C ends it."""
    try:
        status = ask_server(_top(reach, View(sort), interval, once=once))
    except KeyboardInterrupt:
        return
    if status:
        raise typer.Exit(status)


async def _top(reach: Reach, view: View, interval: float, *, once: bool) -> int:
    async with reach.dial() as client:
        polls = _Polls(client, view, reach.address.url)
        await polls.begin()
        if not once and Terminal.is_there():
            return await _Live(polls, interval).run()
        while True:
            await asyncio.sleep(interval)
            await polls.again()
            # In a pipe, complete names matter more than the line length.
            columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            rows = view.shown()
            lines = table(rows, view.sort, columns) if rows else ["no models are loaded"]
            typer.echo("\n".join((printable(polls.head), *lines)))
            if once:
                return 0


class _Polls:
    """Polls the statistics of a server."""

    def __init__(self, client: ServerClient, view: View, url: str) -> None:
        self.client = client
        self.view = view
        self.head = url
        """The first line: the server's URL and a summary of its metrics."""
        self._url = url
        self._before: list[Json] = []
        self._polled_at = 0.0

    async def begin(self) -> None:
        """Poll for the first time; raises CallFailed, or the exceptions of the client."""
        self._before, self._polled_at = await self.client.statistics(), _now()

    async def again(self) -> None:
        """Poll again, and update the view with the rates in between; raises like `begin`."""
        after, now = await self.client.statistics(), _now()
        rows = list(rates(self._before, after, now - self._polled_at))
        self._before, self._polled_at = after, now
        self.view.update(rows)
        self.head = f"{self._url}  {len(rows)} versions{await _from_metrics(self.client)}"


class _Live:
    """The interactive view, redrawn after each key, poll or change of the terminal's size."""

    def __init__(self, polls: _Polls, interval: float) -> None:
        self._polls = polls
        self._view = polls.view
        self._interval = interval
        self._changed = asyncio.Event()
        self._opened = asyncio.Event()
        self._problem = ""
        self._facts: tuple[tuple[str, str], Json | str | None] | None = None
        self._status = 0

    async def run(self) -> int:
        """Show the view until the user quits, restore the terminal, and return the exit status."""
        with Terminal() as terminal, self._signals(terminal):
            async with AsyncExitStack() as running:
                for task in (self._poll(), self._explain()):
                    started = asyncio.create_task(task)
                    # A task ends only with an error, which is raised once the terminal is restored.
                    started.add_done_callback(lambda _: self._end())
                    running.push_async_callback(_cancelled, started)
                while not self._view.ended:
                    self._show(terminal)
                    await self._changed.wait()
                    self._changed.clear()
        return self._status

    def _show(self, terminal: Terminal) -> None:
        facts = self._facts[1] if self._facts and self._facts[0] == self._view.detail else None
        head = f"{self._problem}; {self._polls.head}" if self._problem else self._polls.head
        terminal.show(frame(self._view, head, facts, terminal.size))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            self._problem = await self._tried(self._polls.again()) or ""
            self._changed.set()

    async def _explain(self) -> None:
        """Load the details of the selected model whenever the selection changes."""
        while True:
            await self._opened.wait()
            self._opened.clear()
            wanted = self._view.detail
            if wanted is None:
                self._facts = None
            elif self._facts is None or self._facts[0] != wanted:
                self._facts = wanted, None
                found: list[Json] = []
                problem = await self._tried(self._ask(wanted, found))
                self._facts = wanted, problem or found[0]
                self._changed.set()

    async def _ask(self, wanted: tuple[str, str], found: list[Json]) -> None:
        found.append(await model_facts(self._polls.client, *wanted))

    async def _tried(self, asking: Awaitable[None]) -> str | None:
        """Return the error of a failed request, since a restarting server will answer later."""
        try:
            await asking
        except Exception as error:
            failure = error if isinstance(error, CallFailed) else self._polls.client.failure(error)
            if failure is None:
                raise
            return failure.problem
        return None

    @contextmanager
    def _signals(self, terminal: Terminal) -> Iterator[None]:
        """Handle keys, terminal resizes and signals during a block."""
        loop = asyncio.get_running_loop()

        def _ended(number: int) -> None:
            self._status = SIGNALLED + number
            self._end()

        def _stopped() -> None:
            terminal.give_back()
            os.kill(os.getpid(), signal.SIGSTOP)
            terminal.take()
            self._changed.set()

        handlers: Mapping[int, Callable[[], None]] = {
            signal.SIGTERM: lambda: _ended(signal.SIGTERM),
            signal.SIGHUP: lambda: _ended(signal.SIGHUP),
            signal.SIGTSTP: _stopped,
            signal.SIGWINCH: self._changed.set,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        loop.add_reader(terminal.keys, self._pressed, terminal)
        try:
            yield
        finally:
            loop.remove_reader(terminal.keys)
            for number in handlers:
                loop.remove_signal_handler(number)

    def _pressed(self, terminal: Terminal) -> None:
        try:
            for key in terminal.read():
                self._view.press(key)
        except EOFError:
            self._end()
        self._opened.set()
        self._changed.set()

    def _end(self) -> None:
        self._view.ended = True
        self._changed.set()


async def _cancelled(task: "asyncio.Task[None]") -> None:
    """Cancel a task; raises its exception if it failed."""
    if task.done():
        task.result()
    task.cancel()
    await asyncio.wait([task])


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _from_metrics(client: ServerClient) -> str:
    """Summarize memory from the metrics; empty over gRPC and for servers without metrics."""
    from xlaserve.dialing.over_rest import RestClient

    if not isinstance(client, RestClient):
        return ""
    try:
        text = await client.text("/metrics")
    except CallFailed:
        return ""
    sums = dict.fromkeys(_METRICS, 0.0)
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        name = name.partition("{")[0]
        if name in sums:
            try:
                sums[name] += float(rest.rpartition(" ")[2] or "nan")
            except ValueError:
                return ""
    known = {name: size for name, size in sums.items() if size > 0}
    return "".join(f"  {_METRICS[name]} {format_bytes(int(size))}" for name, size in known.items())
