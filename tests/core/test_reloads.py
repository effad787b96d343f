"""Configuration reloads: on request, and when files change."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.conditions import until

from xlaserve.errors import InvalidSettings
from xlaserve.residence.reloads import Mark, Reloads, marks_of


async def call(look: Callable[[], tuple[Mark, ...]]) -> tuple[Mark, ...]:
    return look()


@asynccontextmanager
async def following(reloads: Reloads) -> AsyncIterator[None]:
    task = asyncio.ensure_future(reloads.follow())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def reloads() -> Reloads:
    """Make a `Reloads` that polls its files continuously."""
    return Reloads(call, check_seconds=0.001)


def outcomes(log: list[Any]) -> list[tuple[str, str]]:
    return [(record["event"], record["what"]) for record in log]


async def test_a_request_reloads_everything_in_order() -> None:
    """Both plain functions and coroutines run; each outcome is logged by name."""
    done: list[str] = []

    async def second() -> None:
        done.append("second")

    reloads = Reloads(call, check_seconds=3600)
    reloads.add("one", lambda: done.append("first"))
    reloads.add("two", second)
    with capture_logs() as log:
        async with following(reloads):
            reloads.request()
            await until(lambda: 2 == len(log))

    assert ["first", "second"] == done
    assert [("reloaded", "one"), ("reloaded", "two")] == outcomes(log)
    assert ["SIGHUP"] * 2 == [record["because"] for record in log]


@pytest.mark.parametrize(
    "error", [InvalidSettings("x", "a file", "none"), OSError("gone"), RuntimeError("a fault")]
)
async def test_what_fails_keeps_nothing_else_from_being_reloaded(error: Exception) -> None:
    def fail() -> None:
        raise error

    reloads = Reloads(call, check_seconds=3600)
    reloads.add("broken", fail)
    reloads.add("whole", lambda: None)
    with capture_logs() as log:
        async with following(reloads):
            reloads.request()
            await until(lambda: 2 == len(log))
            reloads.request()
            await until(lambda: 4 == len(log))

    assert [("not reloaded", "broken"), ("reloaded", "whole")] * 2 == outcomes(log)
    assert {"error"} == {record["log_level"] for record in log if "broken" == record["what"]}


async def test_a_storm_of_requests_is_one_reload_more() -> None:
    may_end = asyncio.Event()
    begun: list[None] = []

    async def slow() -> None:
        begun.append(None)
        await may_end.wait()

    reloads = Reloads(call, check_seconds=3600)
    reloads.add("slow", slow)
    with capture_logs() as log:
        async with following(reloads):
            reloads.request()
            await until(lambda: begun)
            for _ in range(1000):
                reloads.request()
            may_end.set()
            await until(lambda: 2 == len(log))
            for _ in range(100):
                await asyncio.sleep(0)

    assert 2 == len(begun)


async def test_a_file_that_changed_is_read_again(reloads: Reloads, tmp_path: Path) -> None:
    """Callbacks with other files, or without files, do not run."""
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("first")
    other.write_text("other")
    seen: list[str] = []
    reloads.add("file", lambda: seen.append(file.read_text()), [file])
    reloads.add("other", lambda: seen.append("wrong"), [other])
    reloads.add("none", lambda: seen.append("wrong"))
    async with following(reloads):
        replacement = tmp_path / "replacement"
        replacement.write_text("again")
        replacement.rename(file)
        await until(lambda: seen)
        file.unlink()
        file.write_text("a third")
        await until(lambda: "a third" in seen)

    assert {"again", "a third"} >= set(seen) - {""}


async def test_a_swapped_link_is_a_change(reloads: Reloads, tmp_path: Path) -> None:
    """Kubernetes replaces a symbolic link to a directory, not the mounted files."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
    (tmp_path / "..data").symlink_to("one")
    file = tmp_path / "key"
    file.symlink_to("..data/key")
    seen: list[str] = []
    reloads.add("key", lambda: seen.append(file.read_text()), [file])
    async with following(reloads):
        (tmp_path / "..new").symlink_to("two")
        (tmp_path / "..new").rename(tmp_path / "..data")
        await until(lambda: seen)

    assert ["two"] == seen


async def test_what_was_broken_is_said_once_until_it_changes(
    reloads: Reloads, tmp_path: Path
) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("good")
    other.write_text("")
    looks: list[None] = []

    def read() -> None:
        if "good" != file.read_text():
            raise InvalidSettings("x", "good", "bad")

    async def wait(look: Callable[[], tuple[Mark, ...]]) -> tuple[Mark, ...]:
        looks.append(None)
        return look()

    reloads = Reloads(wait, check_seconds=0.001)
    reloads.add("file", read, [file])
    with capture_logs() as log:
        async with following(reloads):
            file.write_text("something else")
            await until(lambda: log)
            before = len(looks)
            await until(lambda: len(looks) > before + 10)
            file.write_text("good")
            await until(lambda: "reloaded" in {record["event"] for record in log})

    assert 1 == sum("not reloaded" == record["event"] for record in log)


async def test_a_signal_is_told_of_its_begin_and_end(tmp_path: Path) -> None:
    told: list[bool | str] = []
    reloads = Reloads(call, check_seconds=3600, on_signal=told.append)
    reloads.add("it", lambda: told.append("reload"))
    async with following(reloads):
        reloads.request()
        await until(lambda: 3 == len(told))

    assert [True, "reload", False] == told


def test_a_file_that_is_not_there_has_a_mark_too(tmp_path: Path) -> None:
    assert (None,) == marks_of([tmp_path / "nothing"])


async def test_what_takes_long_holds_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another reload is requested meanwhile, it runs afterwards."""
    monkeypatch.setattr("xlaserve.residence.reloads._ALONE_SECONDS", 0.0)
    reloads = Reloads(call, check_seconds=3600)
    ends, begun, revoked = asyncio.Event(), [], []

    async def never_read() -> None:
        begun.append(1)
        await ends.wait()

    reloads.add("keys", never_read)
    reloads.add("rules", lambda: revoked.append(1))
    async with following(reloads):
        for number in (1, 2, 3):
            reloads.request()
            await until(lambda: len(revoked) == number)  # noqa: B023
        assert [1] == begun
        ends.set()
        reloads.request()
        await until(lambda: len(revoked) == 4)
        await until(lambda: len(begun) == 2)
