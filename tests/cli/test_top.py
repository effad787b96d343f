"""`xlaserve top`: rates between two polls, keys, any screen size, and terminal restoration."""

import asyncio
import fcntl
import itertools
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.cells import cell_len
from support.process import command
from typer.testing import CliRunner

from xlaserve.cli import application
from xlaserve.cli.terminal import keys_of
from xlaserve.cli.top import rates
from xlaserve.cli.top.rates import Rates
from xlaserve.cli.top.screen import frame, table
from xlaserve.cli.top.view import Key, View


def row(name: str, answers: int, ns: int, *, failed: int = 0, memory: int = 0) -> dict[str, Any]:
    """Return the statistics of a version, with 64-bit integers as gRPC's JSON has them."""
    return {
        "name": name,
        "version": "1",
        "inference_count": str(4 * answers),
        "execution_count": answers,
        "inference_stats": {
            "success": {"count": str(answers), "ns": str(ns)},
            "queue": {"count": answers, "ns": ns // 2},
            "fail": {"count": failed},
        },
        "memory_usage": [{"byte_size": str(memory)}],
    }


def test_rates_are_of_what_was_counted_in_between() -> None:
    before = [row("a", 10, 10_000_000), row("reloaded", 100, 1)]
    after = [row("a", 30, 50_000_000, failed=4), row("reloaded", 2, 4_000_000), row("new", 0, 0)]

    assert [
        rates.Rates("a", "1", 10.0, 2.0, 2.0, 1.0, 4.0, 0),
        rates.Rates("reloaded", "1", 1.0, 0.0, 2.0, 1.0, 4.0, 0),
        rates.Rates("new", "1", 0.0, 0.0, 0.0, 0.0, 0.0, 0),
    ] == list(rates.rates(before, after, 2.0))


@pytest.mark.parametrize(
    ("sort", "order"), [("rate", ["busy", "large"]), ("memory", ["large", "busy"])]
)
async def test_one_frame_is_sorted_by_a_key(sort: str, order: list[str]) -> None:
    looks = itertools.count()

    async def _statistics(_: web.Request) -> web.Response:
        busy = row("busy", 50 * next(looks), 1, memory=1000)
        return web.json_response({"model_stats": [busy, row("large", 0, 0, memory=2 << 20)]})

    async def _metrics(_: web.Request) -> web.Response:
        return web.Response(text='xlaserve_held_bytes{kind="a"} 3000\nxlaserve_held_bytes 2e3\n')

    made = web.Application()
    made.router.add_get("/v2/models/stats", _statistics)
    made.router.add_get("/metrics", _metrics)
    async with TestServer(made) as server:
        url = f"http://127.0.0.1:{server.port}"
        arguments = ["top", "--once", "--interval", "0.05", "--sort", sort, "--url", url]
        result = await asyncio.to_thread(
            CliRunner().invoke, application(), arguments, env={"COLUMNS": "120", "NO_COLOR": "1"}
        )

    assert 0 == result.exit_code, result.exception
    assert f"{url}  2 versions  held for clients 4.88 KiB" == result.output.splitlines()[0].rstrip()
    assert order == [line.split()[0] for line in result.output.splitlines()[2:]]
    assert "\x1b" not in result.output


def rate(name: str, **figures: Any) -> Rates:
    zeros: dict[str, Any] = dict.fromkeys(
        ("rate", "failed", "latency", "queue", "rows", "memory"), 0
    )
    return Rates(name, "1", **(zeros | figures))


def viewed(*keys: str) -> View:
    """Return a view of three models after these keys."""
    view = View()
    view.update([rate("b", rate=1, memory=3), rate("Acat", rate=2, memory=9), rate("c", failed=5)])
    for key in keys:
        view.press(key)
    return view


def names(*keys: str) -> str:
    return " ".join(row.name for row in viewed(*keys).shown())


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ("", "Acat b c"),
        ("r", "c b Acat"),
        ("f", "c Acat b"),
        ("m", "Acat b c"),
        ("mm", "c b Acat"),
        ("n", "Acat b c"),
        ("nn", "c b Acat"),
        ("nnn", "Acat b c"),
        ("/c", "Acat c"),
        ("/CAT", "Acat"),
        ("/x", ""),
    ],
)
def test_keys_sort_and_filter(keys: str, shown: str) -> None:
    assert shown == names(*keys)


def test_what_is_typed_is_a_filter_until_it_is_left() -> None:
    """Keys with other meanings elsewhere are letters of the filter."""
    assert ("cq", True, False) == (
        (view := viewed(*"/cqx", "backspace")).words,
        view.typing,
        view.ended,
    )
    assert "Acat c" == names(*"/c", "enter")
    assert "Acat b c" == names(*"/c", "enter", "escape")
    assert "Acat b c" == names(*"/c", "escape")
    assert viewed(*"/c", "enter", "q").ended


def test_a_pause_keeps_what_is_shown() -> None:
    view = viewed(" ")
    view.update([])
    assert 3 == len(view.rows)
    view.press(" ")
    view.update([])
    assert [] == view.rows


def test_a_row_is_marked_and_opened() -> None:
    """The mark follows its model when the order changes, and stops at both ends."""
    assert ("b", "1") == viewed("down", "enter").detail
    assert ("c", "1") == viewed("down", "down", "down", "enter").detail
    assert ("Acat", "1") == viewed("up", "enter").detail
    assert ("b", "1") == viewed("down", "f", "enter").detail
    assert viewed("down", "enter", "escape").detail is None
    assert ("Acat", "1") == viewed("enter", "escape", "f", "enter").detail
    assert not viewed("enter", "r").reverse
    assert viewed(*"/x", "enter", "enter").detail is None


@pytest.mark.parametrize("size", [(80, 24), (40, 6), (20, 3), (1, 1), (200, 50)])
@pytest.mark.parametrize("keys", ["", "/", "j", "enter"])
def test_a_frame_fits_its_screen(size: tuple[int, int], keys: str) -> None:
    """Including names that are long, wide, or would move the cursor."""
    view = View()
    view.update(
        [rate(name, rate=1.5e9, memory=10**15) for name in ("a" * 99, "模型" * 40, "\x1b[2J")]
    )
    view.press(keys)
    lines = frame(
        view, "http://" + "h" * 300, {"metadata": {}, "versions": [], "configuration": None}, size
    )
    plain = [re.sub("\x1b\\[[0-9]*m", "", line) for line in lines]

    assert len(lines) <= size[1]
    assert max(map(cell_len, plain)) <= size[0]
    assert all(line.isprintable() for line in plain)


def test_eighty_columns_have_rates_times_and_memory() -> None:
    """Without a terminal names are not truncated."""
    long = rate("n" * 60, rate=12.5, memory=2 << 20)
    head, line = table([long], Key.RATE, 80)
    whole = table([long], Key.RATE, None)

    assert [
        "model",
        "answers/s*",
        "failed/s",
        "ms",
        "memory",
        "queue",
        "ms",
        "version",
        "rows",
    ] == (head.split())
    assert "n…" in line
    assert ["n" * 60, "12.5", "2", "MiB", "1"] == whole[1].split()
    assert ["model", "answers/s*"] == table([long], Key.RATE, 25)[0].split()


def test_the_marked_row_stays_on_the_screen() -> None:
    view = View(Key.NAME)
    view.update([rate(f"m{number:03}") for number in range(100)])
    for _ in range(7):
        view.press("page down")
    shown = frame(view, "", None, (80, 10))

    assert any("m070" in line and "\x1b[7m" in line for line in shown)


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[Bx", ["up", "down", "x"]),
        ("\x1b", ["escape"]),
        ("\x1b[5~\r\x7f", ["page up", "enter", "backspace"]),
        ("\x1b[1;5Cq\x01", ["q"]),
        ("é", ["é"]),
    ],
)
def test_keys_have_names(sent: str, keys: list[str]) -> None:
    assert keys == list(keys_of(sent))


@asynccontextmanager
async def statistics_server() -> AsyncIterator[str]:
    """A server whose models have answered more requests at each poll."""
    looks = itertools.count()

    async def _statistics(_: web.Request) -> web.Response:
        rows = [row(name, next(looks), 1) for name in ("first", "second")]
        return web.json_response({"model_stats": rows})

    async def _describe(request: web.Request) -> web.Response:
        tensor = {"name": "picture", "datatype": "FP32", "shape": ["-1"]}
        return web.json_response({"name": request.match_info["name"], "inputs": [tensor]})

    made = web.Application()
    made.router.add_get("/v2/models/stats", _statistics)
    made.router.add_get("/v2/models/{name}/versions/1", _describe)
    async with TestServer(made) as server:
        yield f"http://127.0.0.1:{server.port}"


TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
# A shell has it ignored for what it runs in the background, such as tests.
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def on_terminal(url: str) -> Iterator[tuple[subprocess.Popen[bytes], int, Callable[[str], str]]]:
    """Run `top` on a separate terminal; yields its process, the terminal, and a reader."""
    terminal, inner = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 80, 0, 0))
    # JAX's threads in this process forbid a fork, and keys are signals of a controlling terminal.
    words = [sys.executable, "-c", TAKE_TERMINAL, *command("top", "--url", url)]
    process = subprocess.Popen(
        [*words, "--interval", "0.1"],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        # Larger than the terminal becomes: tox sets them for all its commands.
        env=os.environ | {"COLUMNS": "80", "LINES": "20"},
    )
    os.close(inner)
    os.set_blocking(terminal, False)

    def _until(text: str) -> str:
        """Read until a text has arrived; return everything read."""
        came, end = "", time.monotonic() + 60
        while text not in came:
            assert time.monotonic() < end, came
            try:
                came += os.read(terminal, 1 << 16).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.01)
        return came

    try:
        yield process, terminal, _until
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
async def test_the_terminal_is_given_back(end: str | signal.Signals, status: int) -> None:
    """Keys filter, open and resize first; any exit restores modes and screen."""

    def _use(url: str) -> tuple[list[Any], list[Any], str, int]:
        with on_terminal(url) as (process, terminal, until):
            before = termios.tcgetattr(terminal)
            until("second")
            assert termios.tcgetattr(terminal) != before
            os.write(terminal, b"/sec")
            until("filter: sec")
            os.write(terminal, b"\r\r")
            assert "picture FP32[-1]" in until("picture")
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 9, 40, 0, 0))
            process.send_signal(signal.SIGWINCH)
            until("q quit  escape back  up, down scroll  s…")
            if isinstance(end, str):
                os.write(terminal, end.encode())
            else:
                process.send_signal(end)
            last = until("\x1b[?1049l")
            code = process.wait(60)
            return before, termios.tcgetattr(terminal), last, code

    async with statistics_server() as url:
        before, after, last, code = await asyncio.to_thread(_use, url)

    assert before == after
    assert "\x1b[?25h" in last
    assert status == code
