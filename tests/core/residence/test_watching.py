"""Polling of a repository: what it may contain, and when a model counts as deleted."""

import errno
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import LogCapture
from support.core import AddModel, Core, MakeCore, World

from xlaserve.errors import RepositoryUnreadable
from xlaserve.serving.standing import State
from xlaserve.settings.choices import ModelControlMode, Readiness

ODD: Mapping[str, str] = {
    "loop": "it cannot be read: Too many levels of symbolic links",
    "broken": "it is a dangling link",
    "file": "it is a file, expected a directory",
    "pipe": "it is a FIFO, expected a directory",
    "socket": "it is a socket, expected a directory",
    "null": "it is a character device, expected a directory",
    "x\ny": r"model name 'x\ny' is not allowed: it contains a control character",
    " x": "model name ' x' is not allowed: it starts or ends with white space",
}


@pytest.fixture(name="log")
def _log() -> LogCapture:
    capture = LogCapture()
    structlog.configure(processors=[capture], cache_logger_on_first_use=False)
    return capture


@pytest.fixture
def core(make_core: MakeCore, add_model: AddModel, log: LogCapture) -> Core:
    made = make_core(model_control_mode=ModelControlMode.POLL)
    add_model("a", {1: 1})
    add_model("b", {1: 2})
    return made


def add_odd_entries(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    (root / "broken").symlink_to("nowhere")
    (root / "file").write_text("text")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(root / "socket"))
    (root / "null").symlink_to("/dev/null")
    (root / "x\ny").mkdir()
    (root / " x").mkdir()
    (root / ".hidden").mkdir()
    (root / "lost+found").mkdir()


def events(log: LogCapture, event: str) -> list[Any]:
    return [entry for entry in log.entries if entry["event"] == event]


def ready(core: Core) -> list[str]:
    return [model.name for model in core.registry.models() if core.registry.ready(model.name)]


async def test_odd_entries_are_skipped_with_a_reason(core: Core, log: LogCapture) -> None:
    """They are skipped at startup and while polling, and logged once."""
    await core.control.follower.start()
    add_odd_entries(core.root)
    await core.control.follower.poll()
    await core.control.follower.poll()
    told = events(log, "repository entry skipped")

    assert ODD == {entry["entry"]: entry["reason"] for entry in told}
    assert len(ODD) == len(told) == core.control.follower.watch.skipped
    assert ["a", "b"] == ready(core)


async def test_a_start_skips_odd_entries(core: Core) -> None:
    add_odd_entries(core.root)
    await core.control.follower.start()

    assert ["a", "b"] == ready(core)
    assert core.control.follower.server_ready


async def test_an_odd_entry_is_told_again_when_its_reason_changes(
    core: Core, log: LogCapture
) -> None:
    (core.root / "odd").symlink_to("odd")
    await core.control.follower.start()
    (core.root / "odd").unlink()
    (core.root / "odd").touch()
    await core.control.follower.poll()
    (core.root / "odd").unlink()
    await core.control.follower.poll()
    (core.root / "odd").touch()
    await core.control.follower.poll()
    reasons = [entry["reason"] for entry in events(log, "repository entry skipped")]

    assert [ODD["loop"], ODD["file"], ODD["file"]] == reasons


async def test_thousands_of_odd_entries_are_counted_and_some_are_named(
    core: Core, log: LogCapture
) -> None:
    for number in range(2000):
        (core.root / f"odd-{number}").symlink_to(f"odd-{number}")
    await core.control.follower.start()

    assert 20 == len(events(log, "repository entry skipped"))
    assert [1980] == [e["count"] for e in events(log, "more repository entries skipped")]
    assert 2000 == core.control.follower.watch.skipped


async def test_models_beyond_the_limit_are_named(
    make_core: MakeCore, add_model: AddModel, log: LogCapture
) -> None:
    core = make_core(model_control_mode=ModelControlMode.POLL, max_models=1)
    add_model("a", {1: 1})
    add_model("b", {1: 2})
    await core.control.follower.start()
    (told,) = events(log, "repository entry skipped")

    assert ("b", "it exceeds the limit of 1 models (max_models)") == (told["entry"], told["reason"])
    assert ["a"] == ready(core)


def vanish(core: Core) -> None:
    """Have the root fail to list."""
    core.root.rename(core.root.with_name("elsewhere"))


def unmount(core: Core) -> None:
    """Replace the root by an empty directory, as unmounting its volume does."""
    vanish(core)
    core.root.mkdir()


def replace_by_file(core: Core) -> None:
    vanish(core)
    core.root.touch()


@pytest.mark.parametrize("take_away", [vanish, unmount, replace_by_file])
async def test_a_volume_that_vanished_changes_nothing(
    core: Core, world: World, log: LogCapture, take_away: Any
) -> None:
    """The models stay loaded; the loss is logged once, and nothing is reloaded afterwards."""
    await core.control.follower.start()
    take_away(core)
    await core.control.follower.poll()
    await core.control.follower.poll()

    assert ["a", "b"] == ready(core)
    assert core.control.follower.watch.problem
    assert 1 == len(events(log, "repository unreadable, its models stay loaded"))

    core.root.unlink() if core.root.is_file() else shutil.rmtree(core.root, ignore_errors=True)
    core.root.with_name("elsewhere").rename(core.root)
    await core.control.follower.poll()

    assert "" == core.control.follower.watch.problem
    assert 1 == len(events(log, "repository readable again"))
    assert 2 == len(world.loads)


async def test_what_the_operator_deletes_is_unloaded(core: Core) -> None:
    """This includes the last model, whose removal leaves an empty root."""
    await core.control.follower.start()
    shutil.rmtree(core.root / "a")
    await core.control.follower.poll()

    assert ["b"] == ready(core)

    shutil.rmtree(core.root / "b")
    await core.control.follower.poll()
    await core.control.follower.poll()

    assert [] == ready(core)
    assert "" == core.control.follower.watch.problem


@pytest.mark.parametrize(("fraction", "removed"), [(0.0, 1), (0.5, 3), (0.5, 4), (1.0, 4)], ids=str)
async def test_where_many_models_are_gone_a_second_look_decides(
    make_core: MakeCore,
    add_model: AddModel,
    log: LogCapture,
    world: World,
    fraction: float,
    removed: int,
) -> None:
    """A store that returns one empty listing unloads nothing, but the log warns."""
    core = make_core(model_control_mode=ModelControlMode.POLL, poll_unload_fraction=fraction)
    names = [add_model(name, {1: 1}).name for name in "abcd"]
    await core.control.follower.start()
    away = core.root.with_name("away")
    away.mkdir()
    for name in names[:removed]:
        (core.root / name).rename(away / name)
    await core.control.follower.poll()
    (told,) = events(log, "models missing from the repository, kept until the next poll")

    assert (names, removed, 4) == (ready(core), told["gone"], told["models"])
    assert "DOUBTED" == core.registry.standing.state.name
    assert core.control.follower.server_ready

    for name in names[:removed]:
        (away / name).rename(core.root / name)
    await core.control.follower.poll()
    await core.control.follower.poll()

    assert names == ready(core)
    assert "SETTLED" == core.registry.standing.state.name
    assert 4 == len(world.loads)

    for name in names[:removed]:
        (core.root / name).rename(away / name)
    await core.control.follower.poll()
    await core.control.follower.poll()

    assert names[removed:] == ready(core)


@pytest.mark.parametrize(("fraction", "removed"), [(0.5, 2), (1.0, 3)], ids=str)
async def test_where_few_models_are_gone_one_look_decides(
    make_core: MakeCore, add_model: AddModel, fraction: float, removed: int
) -> None:
    core = make_core(model_control_mode=ModelControlMode.POLL, poll_unload_fraction=fraction)
    for name in "abcd":
        add_model(name, {1: 1})
    await core.control.follower.start()
    for name in "abcd"[:removed]:
        shutil.rmtree(core.root / name)
    await core.control.follower.poll()

    assert list("abcd"[removed:]) == ready(core)


async def test_what_a_second_look_misses_besides_waits_for_a_third(
    make_core: MakeCore, add_model: AddModel
) -> None:
    core = make_core(model_control_mode=ModelControlMode.POLL, poll_unload_fraction=0.0)
    for name in "abc":
        add_model(name, {1: 1})
    await core.control.follower.start()
    shutil.rmtree(core.root / "a")
    await core.control.follower.poll()
    shutil.rmtree(core.root / "b")
    await core.control.follower.poll()

    assert ["b", "c"] == ready(core)

    await core.control.follower.poll()

    assert ["c"] == ready(core)


async def test_another_directory_that_holds_models_is_followed(
    core: Core, add_model: AddModel
) -> None:
    await core.control.follower.start()
    vanish(core)
    add_model("c", {1: 3})
    await core.control.follower.poll()

    assert ["a", "b", "c"] == ready(core)

    await core.control.follower.poll()

    assert ["c"] == ready(core)


async def test_a_listing_that_breaks_off_changes_nothing(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenOff:
        def __enter__(self) -> Iterator[Any]:
            def entries() -> Iterator[Any]:
                yield from some
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            return entries()

        def __exit__(self, *error: object) -> None: ...

    await core.control.follower.start()
    some = list(os.scandir(core.root))[:1]
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", lambda path: BrokenOff())
        await core.control.follower.poll()

    assert ["a", "b"] == ready(core)
    assert "it cannot be read: Input/output error" == core.control.follower.watch.problem


@pytest.mark.parametrize("becomes", ["nothing there", "a loop", "a file", "an empty directory"])
async def test_a_name_that_is_still_there_keeps_what_it_serves(
    core: Core, becomes: str, world: World
) -> None:
    await core.control.follower.start()
    before = (core.root / "a").rename(core.root.with_name("a"))
    (core.root / "a").mkdir() if becomes == "an empty directory" else None
    (core.root / "a").touch() if becomes == "a file" else None
    (core.root / "a").symlink_to("a") if becomes == "a loop" else None
    (core.root / "a").symlink_to("nowhere") if becomes == "nothing there" else None
    await core.control.follower.poll()
    await core.control.follower.poll()

    assert ["a", "b"] == ready(core)

    (core.root / "a").rmdir() if becomes == "an empty directory" else (core.root / "a").unlink()
    before.rename(core.root / "a")
    await core.control.follower.poll()

    assert ["a/1", "b/1"] == sorted(world.loads)


async def test_a_model_that_cannot_be_read_keeps_what_it_serves(
    core: Core, monkeypatch: pytest.MonkeyPatch, log: LogCapture
) -> None:
    """A part of a model that cannot be listed does not count as deleted."""
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(os.fspath(path)) == core.root / "a/1":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return scandir(path)

    await core.control.follower.start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        await core.control.follower.poll()
        await core.control.follower.poll()
    (told,) = events(log, "model not loaded from the repository")

    assert ["a", "b"] == ready(core)
    assert told["error"].endswith(f"'{core.root / 'a/1'}' cannot be read: Input/output error")


async def test_a_model_that_is_being_written_is_loaded_when_it_is_whole(
    core: Core, log: LogCapture
) -> None:
    """The previous version answers until then, and each state of the files is reported once."""
    await core.control.follower.start()
    (core.root / "a/2").mkdir()
    (core.root / "a/2/amount.json").write_text("{")
    await core.control.follower.poll()
    await core.control.follower.poll()

    assert 1 == len(events(log, "model not loaded from the repository"))
    assert ["1"] == [v.number for v in core.registry.models()[0].versions.values() if v.instance]

    (core.root / "a/2/amount.json").write_text(json.dumps(5))
    await core.control.follower.poll()

    assert ["2"] == [v.number for v in core.registry.models()[0].versions.values() if v.instance]


async def test_a_version_whose_link_leads_nowhere_keeps_what_it_serves(
    make_core: MakeCore, add_model: AddModel
) -> None:
    core = make_core(model_control_mode=ModelControlMode.POLL)
    add_model("a", {1: 1, 2: 2}, {"version_policy": {"all": {}}})
    await core.control.follower.start()
    (core.root / "a/2").rename(core.root.with_name("2"))
    (core.root / "a/2").symlink_to("nowhere")
    await core.control.follower.poll()
    (model,) = core.registry.models()

    assert ["1", "2"] == sorted(v.number for v in model.versions.values() if v.instance)

    (core.root / "a/2").unlink()
    await core.control.follower.poll()

    assert ["1"] == [v.number for v in model.versions.values() if v.instance]


@pytest.mark.parametrize("readiness", list(Readiness))
async def test_a_start_waits_for_a_root_that_cannot_be_read(
    make_core: MakeCore, add_model: AddModel, readiness: Readiness
) -> None:
    """A polling server becomes ready once it has seen its repository."""
    core = make_core(model_control_mode=ModelControlMode.POLL, readiness=readiness)
    add_model("a", {1: 1})
    vanish(core)
    await core.control.follower.start()
    await core.control.follower.poll()

    assert not core.control.follower.server_ready
    with pytest.raises(RepositoryUnreadable, match="could not be read yet"):
        await core.control.catalog.index()

    core.root.with_name("elsewhere").rename(core.root)
    await core.control.follower.poll()

    assert core.control.follower.server_ready
    assert ["a"] == ready(core)


async def test_what_vanishes_beside_a_root_that_is_away_is_unloaded(
    make_core: MakeCore, add_model: AddModel, tmp_path: Path
) -> None:
    """Readable parts are followed from the first scan on."""
    core = make_core(
        model_control_mode=ModelControlMode.POLL, model_repository=(tmp_path / "away",)
    )
    for name in "abc":
        add_model(name, {1: 1})
    await core.control.follower.start()

    assert (["a", "b", "c"], State.AWAY) == (ready(core), core.registry.standing.state)

    shutil.rmtree(core.root / "a")
    await core.control.follower.poll()

    assert (["b", "c"], State.AWAY) == (ready(core), core.registry.standing.state)
    assert not core.control.follower.server_ready

    (tmp_path / "away").mkdir()
    await core.control.follower.poll()

    assert (["b", "c"], State.SETTLED) == (ready(core), core.registry.standing.state)
    assert core.control.follower.server_ready


@pytest.mark.parametrize(
    "changes",
    [{"model_control_mode": ModelControlMode.NONE}, {"load_model": ("*",)}],
)
async def test_a_start_that_nothing_would_follow_fails(
    make_core: MakeCore, changes: dict[str, Any]
) -> None:
    core = make_core(**changes)
    vanish(core)

    with pytest.raises(RepositoryUnreadable, match="it cannot be read: No such file"):
        await core.control.follower.start()


async def test_clients_load_once_the_root_can_be_read(
    make_core: MakeCore, add_model: AddModel
) -> None:
    core = make_core()
    add_model("a", {1: 1})
    vanish(core)
    await core.control.follower.start()
    core.root.with_name("elsewhere").rename(core.root)
    await core.control.load("a")

    assert core.control.follower.server_ready
    assert ["a"] == ready(core)


async def test_a_model_that_failed_and_was_deleted_does_not_keep_the_server_from_being_ready(
    make_core: MakeCore, add_model: AddModel
) -> None:
    core = make_core(model_control_mode=ModelControlMode.POLL, readiness=Readiness.MODELS)
    directory = add_model("bad", {1: 1})
    (directory / "1/amount.json").write_text("no number")
    await core.control.follower.start()

    assert not core.control.follower.server_ready

    shutil.rmtree(directory)
    await core.control.follower.poll()
    await core.control.follower.poll()

    assert core.control.follower.server_ready


# --- hints ---


def version(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "model.json").write_text("{}")


@pytest.mark.parametrize(
    ("made", "served", "said"),
    [
        ([], ".", "it is empty: expected MODEL/VERSION/"),
        (["digits/1"], ".", ""),
        (["digits/1"], "digits", "it looks like a model: serve its parent '{root}'"),
        (["digits/1"], "digits/1", "it looks like a version of a model: serve '{root}'"),
        (["m/digits/1"], ".", "its directory 'm' contains models: serve '{root}/m'"),
        (["digits"], ".", "none of its directories has a version: expected MODEL/VERSION/"),
        (["1/1"], ".", ""),
        (["x.onnx"], ".", "'x.onnx' must be converted first: xlaserve import {root}/x.onnx"),
        (["x.pt2"], ".", "'x.pt2' must be converted first: xlaserve import {root}/x.pt2"),
        (["x.jaxexp"], ".", "'x.jaxexp' is a model in one file: expected MODEL/VERSION/"),
    ],
)
async def test_a_wrong_root_gets_a_hint(
    make_core: MakeCore, log: LogCapture, made: list[str], served: str, said: str
) -> None:
    core = make_core(model_control_mode=ModelControlMode.POLL)
    for name in made:
        path = core.root / name
        path.touch() if path.suffix else version(path)
    core.repository.root = core.root / served
    await core.control.follower.start()
    await core.control.follower.poll()
    told = [entry["hint"] for entry in events(log, "no models found")]

    assert bool(said) == len(told)
    assert all(hint.startswith(said.format(root=core.root)) for hint in told)
