"""A process that starts later repeats the clients' changes, in an order that works."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xlaserve.app import replacing
from xlaserve.concurrency.control_plane import Change, ChangeKind, ChangeText, Journal, OneProcess
from xlaserve.concurrency.replay import Replay
from xlaserve.errors import FilesMissing, LoadFailed
from xlaserve.process.systemd import Systemd
from xlaserve.residence import handover
from xlaserve.residence.handover import ChangesNotTaken
from xlaserve.settings import Settings
from xlaserve.workers.control import Control
from xlaserve.workers.messages import Did, Do, Failure
from xlaserve.workers.worker_process import WorkerProcess

NEEDS: Mapping[str, Sequence[str]] = {"outer": ("inner",), "inner": ("a", "b")}
"""Ensembles and their steps, whose files clients have sent."""
MODELS = ("a", "b", "inner", "outer")


def load(name: str, **arguments: Any) -> ChangeText:
    return ChangeText(ChangeKind.LOAD, name, arguments)


@dataclass(eq=False)
class Loads:
    """A process that loads a model only if its steps are loaded."""

    has: list[str] = field(default_factory=list)
    refuses: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    """Models that always fail, whatever else is loaded."""
    asked: list[str] = field(default_factory=list)
    error: type[LoadFailed] = LoadFailed
    is_ready: bool = True
    is_silent: bool = False
    role: Any = field(default_factory=lambda: SimpleNamespace(worker=0))

    def makes(self, kind: ChangeKind) -> bool:
        return True

    def load(self, name: str) -> None:
        self.asked.append(name)
        if name in self.broken:
            raise self.error(name, f"'{name}': expected weights, got none")
        missing = [step for step in NEEDS.get(name, ()) if step not in self.has]
        if name in self.refuses or missing:
            raise self.error(name, f"its step failed: {missing}")
        self.has.append(name)

    async def expect(self, message: Any, key: tuple[str, int]) -> Any:
        assert isinstance(message, Do)
        try:
            self.load(message.change.subject)
        except LoadFailed as error:
            return Did(key[1], Failure("LoadFailed", str(error)))
        return Did(key[1])

    async def replay_change(self, change: Change) -> None:
        self.load(change.subject)

    async def replies(self, question: str) -> Sequence[Any]:
        return [{"versions": {name: ["1"] for name in self.has}, "failed": {}}]


def test_a_repeated_load_stays_before_what_was_loaded_behind_it() -> None:
    journal = Journal()
    for change in (load("a"), load("e"), load("a", config="{}")):
        journal.remember(change)
    unloaded = ChangeText(ChangeKind.UNLOAD, "a", {"models": ["a"]})
    again = [change.subject for change in journal.changes()], journal.last(load("a"))
    journal.remember(unloaded)
    journal.remember(load("a"))

    assert (["a", "e"], load("a", config="{}")) == again
    assert ["e", "a"] == [change.subject for change in journal.changes()]


ORDERS = list(itertools.permutations(MODELS))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_a_worker_that_comes_later_has_all_whatever_their_order(
    order: Sequence[str],
) -> None:
    worker = Loads()
    control = Control(lambda: [cast("WorkerProcess", worker)], Path("/nowhere"))
    for name in order:
        control._remember(load(name))
    await control.replay(cast("WorkerProcess", worker))

    assert set(MODELS) == set(worker.has)


async def test_one_that_cannot_be_loaded_leaves_the_others() -> None:
    worker = Loads(refuses=("b",))
    control = Control(lambda: [cast("WorkerProcess", worker)], Path("/nowhere"))
    for name in ("outer", "inner", "b", "a"):
        control._remember(load(name))
    await control.replay(cast("WorkerProcess", worker))

    assert ["a"] == worker.has


BROKEN = (
    # Always fails: tried once, whatever follows.
    (("bad", "a", "b"), ("bad", "a", "b")),
    (("a", "step", "b"), ("a", "step", "b")),
    # Nothing was loaded after it.
    (("a", "inner"), ("a", "inner")),
    # Only the ensemble is retried, as often as that may help.
    (("inner", "bad", "a", "step", "b"), ("inner", "bad", "a", "step", "b", "inner")),
    (("outer", "inner", "a", "b"), ("outer", "inner", "a", "b", "outer", "inner", "outer")),
    (("inner", "a"), ("inner", "a", "inner")),
)
"""Changes of a server, and the attempts made for them, in order."""


@pytest.mark.parametrize(("names", "makes"), BROKEN)
async def test_a_load_that_fails_for_itself_is_made_once(
    tmp_path: Path, names: Sequence[str], makes: Sequence[str]
) -> None:
    """By a worker that starts later, and by a server that replaces another."""
    worker, here = Loads(broken=("bad", "step")), Loads(broken=("bad", "step"), error=FilesMissing)
    control = Control(lambda: [cast("WorkerProcess", worker)], Path("/nowhere"))
    for name in names:
        control._remember(load(name))
    await control.replay(cast("WorkerProcess", worker))
    systemd = cast(Systemd, SimpleNamespace(predecessor=Predecessor(tmp_path, names)))
    settings = Settings.read({}, repository=tmp_path, model_control_mode="explicit")
    await replacing.take_changes(systemd, settings, here)

    assert list(makes) == worker.asked
    assert list(makes) == here.asked


async def test_the_files_of_a_load_that_is_not_made_again_are_let_go() -> None:
    async def make(change: Change) -> str | None:
        return {"a": None, "inner": "its step failed"}.get(change.subject, "it fails")

    replay = Replay(make, str, lambda change: Change(change.kind, change.subject))
    for name in ("a", "bad", "inner"):
        await replay.make(Change(ChangeKind.LOAD, name, {}, {"file": b"x"}))
    held = [(one.change.subject, dict(one.change.files)) for one in replay.failed]

    assert [("bad", {}), ("inner", {"file": b"x"})] == held


class Predecessor:
    """A server that hands over its changes."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        changes = [load(name) for name in names]
        versions = {name: ["1"] for name in names}
        self._file, _ = handover.write(path, changes, lambda _: {"file": b"x"}, versions)

    async def changes(self) -> Any:
        return self._file


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("error", [LoadFailed, FilesMissing])
async def test_so_has_a_server_that_replaces_another(
    tmp_path: Path, seed: int, error: type[LoadFailed]
) -> None:
    names = random.Random(seed).sample(MODELS, len(MODELS))
    here = Loads(error=error)
    systemd = cast(Systemd, SimpleNamespace(predecessor=Predecessor(tmp_path, names)))
    settings = Settings.read({}, repository=tmp_path, model_control_mode="explicit")
    await replacing.take_changes(systemd, settings, here)

    assert set(MODELS) == set(here.has)


async def test_a_model_that_fails_still_blocks_the_replacement(tmp_path: Path) -> None:
    here = Loads(refuses=("b",))
    systemd = cast(Systemd, SimpleNamespace(predecessor=Predecessor(tmp_path, ["outer", "b"])))
    settings = Settings.read({}, repository=tmp_path, model_control_mode="explicit")
    with pytest.raises(ChangesNotTaken, match="load 'outer'"):
        await replacing.take_changes(systemd, settings, here)


async def test_one_process_keeps_the_order_too() -> None:
    plane = OneProcess()

    async def nothing() -> None: ...

    for name in ("a", "e", "a"):
        await plane.apply(Change(ChangeKind.LOAD, name), nothing)
    held = await plane.hold({ChangeKind.LOAD})

    assert ["a", "e"] == [change.subject for change in held]


async def test_a_process_that_is_not_ready_does_not_speak_for_the_server() -> None:
    starting = Loads(is_ready=False)
    control = Control(lambda: [cast("WorkerProcess", starting)], Path("/nowhere"))

    assert [] == list(await control.replies("answering"))


async def test_a_replacement_that_no_engine_answers_for_takes_nothing_over(tmp_path: Path) -> None:
    class Dead(Loads):
        async def replies(self, question: str) -> Sequence[Any]:
            return ()

    systemd = cast(Systemd, SimpleNamespace(predecessor=Predecessor(tmp_path, ["a"])))
    settings = Settings.read({}, repository=tmp_path, model_control_mode="explicit")
    with pytest.raises(
        ChangesNotTaken,
        match="no model-loading process responds: it died, is starting or is silent",
    ):
        await replacing.take_changes(systemd, settings, Dead())
