"""Loading, reloading and unloading, with models that need no JAX."""

import asyncio
import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs
from support.core import AddModel, Core, FakeModel, MakeCore, World

from xlaserve.errors import (
    InvalidName,
    InvalidParameter,
    LoadCancelled,
    LoadFailed,
    ModelControlForbidden,
    ModelNotFound,
    ModelNotReady,
    OutOfFiles,
    OutOfSpace,
    ShuttingDown,
    TooLarge,
)
from xlaserve.residence.repository.sources import ModelSource
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.settings.choices import ModelControlMode, Readiness
from xlaserve.tensors import DATATYPES

ONE = np.ones((1, 2), np.float32)


async def answer(core: Core, model: str, version: str = "") -> tuple[str, float]:
    """Return the version that answers, and the amount it added to 1."""
    request = InferRequest(model, version, inputs=(InferInput("x", DATATYPES["FP32"], ONE),))
    response = await core.engine.infer(request)
    return response.model_version, float(response.outputs[0].data[0, 0]) - 1


async def index(core: Core) -> dict[str, str]:
    rows = await core.control.catalog.index()
    return {f"{row.name}/{row.version}": f"{row.state} {row.reason}".strip() for row in rows}


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_loaded_model_answers(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 5})
    await core.control.load("m")

    assert ("1", 5.0) == await answer(core, "m")
    assert {"m/1": "READY"} == await index(core)


async def test_the_newest_version_answers_by_default(core: Core, add_model: AddModel) -> None:
    """Versions compare as numbers: 10 is newer than 9."""
    add_model("m", {9: 9, 10: 10}, {"version_policy": {"all": {}}})
    await core.control.load("m")

    assert ("10", 10.0) == await answer(core, "m")
    assert ("9", 9.0) == await answer(core, "m", "9")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, ["3"]),
        ({"version_policy": {"latest": {"num_versions": 2}}}, ["2", "3"]),
        ({"version_policy": {"all": {}}}, ["1", "2", "3"]),
        ({"version_policy": {"specific": {"versions": [1, 3]}}}, ["1", "3"]),
    ],
)
async def test_the_version_policy_picks(
    core: Core, add_model: AddModel, policy: dict[str, Any], expected: list[str]
) -> None:
    add_model("m", {1: 1, 2: 2, 3: 3}, policy)
    await core.control.load("m")

    assert expected == [row.version for row in await core.control.catalog.index(ready=True)]


async def test_an_unknown_model_is_not_found(core: Core) -> None:
    """The error is NOT_FOUND, with the text that clients look for."""
    with pytest.raises(ModelNotFound, match="^Request for unknown model: 'm' .*failed to load"):
        await core.control.load("m")
    with pytest.raises(ModelNotFound, match="^Request for unknown model: 'm' is not found"):
        await core.control.unload("m")
    with pytest.raises(ModelNotFound, match="^Request for unknown model: 'm' is not found"):
        await answer(core, "m")


async def test_an_unknown_version_is_not_found(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")

    with pytest.raises(ModelNotFound, match="'m' version 7"):
        await answer(core, "m", "7")


async def test_loads_that_come_together_are_one(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    await asyncio.gather(*(core.control.load("m") for _ in range(20)))

    assert ["m/1"] == world.loads


async def test_an_unchanged_version_is_not_loaded_again(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    await core.control.load("m")

    assert ["m/1"] == world.loads


async def test_a_load_that_waited_for_another_sees_what_is_there_then(
    core: Core, add_model: AddModel, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that did not wait reads its files once."""
    found: list[str] = []
    find = core.repository.find

    def noted(name: str, **more: Any) -> ModelSource:
        found.append(name)
        return find(name, **more)

    monkeypatch.setattr(core.repository, "find", noted)
    add_model("m", {1: 1})
    world.may_load.clear()
    first = asyncio.create_task(core.control.load("m"))
    await until(lambda: world.loads)
    looks = len(found)
    second = asyncio.create_task(core.control.load("m", {"config": "{}"}))
    await until(lambda: core.control._turns._locks["m"][1] == 2)
    add_model("m", {1: 2})
    world.may_load.set()
    await asyncio.gather(first, second)

    assert (1, 3) == (looks, len(found))
    assert ("1", 2.0) == await answer(core, "m")


async def test_a_reload_replaces_the_version_and_closes_the_old(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    add_model("m", {1: 2})
    await core.control.load("m")

    assert ("1", 2.0) == await answer(core, "m")
    assert [2.0] == [model.amount for model in world.open]


async def test_a_load_that_comes_once_files_are_read_reads_them_again(
    core: Core, add_model: AddModel, world: World
) -> None:
    """The client may have written them meanwhile; loads requested by then share the next run."""
    has_read, may_end = threading.Event(), threading.Event()

    def read(*said: Any) -> FakeModel:
        has_read.set()
        may_end.wait(60)
        return FakeModel(*said)

    world.model_type = read
    add_model("m", {1: 1})
    loads = [asyncio.ensure_future(core.control.load("m"))]
    await asyncio.to_thread(has_read.wait, 60)
    add_model("m", {1: 2})
    for _ in range(20):
        loads.append(asyncio.ensure_future(core.control.load("m")))
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*loads)

    assert ("1", 2.0) == await answer(core, "m")
    assert ["m/1"] * 2 == world.loads


async def test_the_old_version_answers_while_the_new_one_loads(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    add_model("m", {1: 2})
    world.may_load.clear()
    reload = asyncio.create_task(core.control.load("m"))
    await until(lambda: len(world.loads) == 2)

    assert ("1", 1.0) == await answer(core, "m")
    assert ["READY"] == [row.state for row in await core.control.catalog.index()]

    world.may_load.set()
    await reload

    assert ("1", 2.0) == await answer(core, "m")


async def test_a_failed_reload_keeps_the_old_version(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    (core.root / "m/1/amount.json").write_text("broken")
    with pytest.raises(LoadFailed, match="failed to load 'm', amount.json is not a number"):
        await core.control.load("m")

    assert ("1", 1.0) == await answer(core, "m")
    assert "READY serves the earlier version, its reload failed" in (await index(core))["m/1"]


async def test_a_failed_new_version_keeps_the_old_one(core: Core, add_model: AddModel) -> None:
    """With `latest`, version 1 leaves only once version 2 answers."""
    add_model("m", {1: 1})
    await core.control.load("m")
    directory = add_model("m", {2: 2})
    (directory / "2/amount.json").write_text("broken")
    with pytest.raises(LoadFailed):
        await core.control.load("m")

    assert ("1", 1.0) == await answer(core, "m")

    add_model("m", {2: 2})
    await core.control.load("m")

    assert ("2", 2.0) == await answer(core, "m")
    assert "UNAVAILABLE unloaded" == (await index(core))["m/1"]


async def test_an_unloaded_model_is_gone(core: Core, add_model: AddModel, world: World) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    await core.control.unload("m")

    assert [] == world.open
    assert {"m/1": "UNAVAILABLE unloaded"} == await index(core)
    with pytest.raises(ModelNotFound, match="'m' has no available versions"):
        await answer(core, "m")


async def test_unloading_what_is_not_loaded_is_no_error(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1})
    await core.control.unload("m")
    await core.control.load("m")
    await core.control.unload("m")
    await core.control.unload("m")

    assert not core.registry.ready("m")


async def test_an_unload_waits_for_a_load_that_has_not_found_its_files(
    core: Core, add_model: AddModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry does not know the model yet: an early return would leave it loaded."""
    add_model("m", {1: 1})
    may_find, found, find = threading.Event(), threading.Event(), core.repository.find

    def held(*arguments: Any, **more: Any) -> ModelSource:
        found.set()
        may_find.wait(60)
        return find(*arguments, **more)

    monkeypatch.setattr(core.repository, "find", held)
    loading = asyncio.ensure_future(core.control.load("m"))
    await until(found.is_set)
    unloading = asyncio.ensure_future(core.control.unload("m"))
    for _ in range(10):
        await asyncio.sleep(0)
    was_done = unloading.done()
    may_find.set()
    await asyncio.gather(loading, unloading)

    assert (False, False) == (was_done, core.registry.ready("m"))


async def test_an_unload_waits_for_requests_in_progress(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    world.may_execute.clear()
    request = asyncio.create_task(answer(core, "m"))
    await until(lambda: core.registry.requests == 1)
    unload = asyncio.create_task(core.control.unload("m"))
    await until(lambda: not core.registry.ready("m"))

    assert "UNLOADING waiting for requests in progress" == (await index(core))["m/1"]
    with pytest.raises(ModelNotReady, match="UNLOADING"):
        await answer(core, "m")

    world.may_execute.set()

    assert ("1", 1.0) == await request
    await unload
    assert [] == world.open


async def test_an_unload_ends_in_bounded_time(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    """A request that outlives the drain keeps its memory until it completes."""
    core = make_core(drain_seconds=0.01)
    add_model("m", {1: 1})
    await core.control.load("m")
    world.may_execute.clear()
    request = asyncio.create_task(answer(core, "m"))
    await until(lambda: core.registry.requests == 1)
    await core.control.unload("m")

    assert 1 == len(world.open)

    world.may_execute.set()

    assert ("1", 1.0) == await request
    await until(lambda: not world.open)


async def test_a_cancelled_request_keeps_the_model_until_its_thread_ends(
    core: Core, add_model: AddModel, world: World
) -> None:
    """The fake model fails the test when it is closed while it executes."""
    add_model("m", {1: 1})
    await core.control.load("m")
    world.may_execute.clear()
    request = asyncio.create_task(answer(core, "m"))
    await until(lambda: core.registry.requests == 1)
    request.cancel()
    unload = asyncio.create_task(core.control.unload("m"))
    await until(lambda: not core.registry.ready("m"))

    assert 1 == len(world.open)

    world.may_execute.set()
    await unload

    assert [] == world.open


async def test_a_cancelled_load_leaves_nothing(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    world.may_load.clear()
    load = asyncio.create_task(core.control.load("m"))
    await until(world.loading.is_set)
    load.cancel()
    await asyncio.sleep(0)
    world.may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await load

    assert [] == world.open
    assert {"m/1": "UNAVAILABLE the load was cancelled"} == await index(core)

    await core.control.load("m")

    assert ("1", 1.0) == await answer(core, "m")


ENDS: dict[str, tuple[Callable[[Core, "asyncio.Task[None]"], Any], str, str]] = {
    "left": (
        lambda core, load: load.cancel(),
        "its clients, none of which is waiting now",
        "the next load starts from the beginning",
    ),
    "stopped": (lambda core, load: core.control.begin_shutdown(), "the server's shutdown", "start"),
    "evicted": (
        lambda core, load: asyncio.ensure_future(core.control.evict("m")),
        "an unload by the server",
        "until a client loads it",
    ),
    "purged": (
        lambda core, load: asyncio.ensure_future(core.control.purge()),
        "an unload of every model by the server",
        "until a client loads it",
    ),
}
"""How a load ends early, which error its caller gets, and what follows."""


@pytest.mark.parametrize("how", ENDS)
async def test_a_cancelled_load_is_a_line_that_names_who_and_what_next(
    core: Core, add_model: AddModel, world: World, how: str
) -> None:
    end, by, then = ENDS[how]
    add_model("m", {1: 1})
    world.may_load.clear()
    with capture_logs() as log:
        load = asyncio.create_task(core.control.load("m"))
        await until(world.loading.is_set)
        ended = end(core, load)
        await asyncio.sleep(0)
        world.may_load.set()
        with pytest.raises((asyncio.CancelledError, LoadCancelled, ShuttingDown)):
            await load
        if isinstance(ended, asyncio.Future):
            await ended

    (line,) = (one for one in log if one["event"] == "model not loaded")
    assert ("info", "the load was cancelled") == (line["log_level"], line["reason"])
    assert (True, True) == (by in line["cancelled_by"], then in line["consequence"]), line
    assert "the server" == line["asked_by"]
    assert {} == core.control.failed_loads


async def test_a_cancelled_reload_says_that_the_old_version_answers(
    core: Core, add_model: AddModel, world: World
) -> None:
    directory = add_model("m", {1: 1})
    await core.control.load("m")
    (directory / "1" / "amount.json").write_text("2")
    world.loading.clear()
    world.may_load.clear()
    with capture_logs() as log:
        load = asyncio.create_task(core.control.load("m"))
        await until(world.loading.is_set)
        load.cancel()
        await asyncio.sleep(0)
        world.may_load.set()
        with pytest.raises(asyncio.CancelledError):
            await load

    (line,) = (one for one in log if one["event"] == "model not loaded")
    assert "the previously loaded version continues to answer" == line["consequence"]
    assert ("1", 1.0) == await answer(core, "m")


async def test_the_index_shows_the_stage_of_a_load(
    core: Core, add_model: AddModel, world: World
) -> None:
    add_model("m", {1: 1})
    world.may_load.clear()
    load = asyncio.create_task(core.control.load("m"))
    await until(world.loading.is_set)
    await asyncio.sleep(0)

    assert {"m/1": "LOADING compiling 1 of 2"} == await index(core)
    with pytest.raises(ModelNotReady, match="LOADING"):
        await answer(core, "m")

    world.may_load.set()
    await load


async def test_the_index_lists_what_was_never_loaded(core: Core, add_model: AddModel) -> None:
    add_model("a", {1: 1})
    add_model("b", {1: 1})
    await core.control.load("b")

    assert {"a/": "UNAVAILABLE not loaded", "b/1": "READY"} == await index(core)
    assert ["b"] == [row.name for row in await core.control.catalog.index(ready=True)]


@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.POLL])
async def test_only_the_explicit_mode_lets_clients_control(
    make_core: MakeCore, add_model: AddModel, mode: ModelControlMode
) -> None:
    core = make_core(model_control_mode=mode)
    add_model("m", {1: 1})

    with pytest.raises(ModelControlForbidden, match=f"mode is '{mode.value}'"):
        await core.control.load("m")
    with pytest.raises(ModelControlForbidden):
        await core.control.unload("m")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_control_mode": ModelControlMode.NONE}, ["a", "b"]),
        ({"model_control_mode": ModelControlMode.POLL}, ["a", "b"]),
        ({}, []),
        ({"load_model": ("b",)}, ["b"]),
        ({"load_model": ("*",)}, ["a", "b"]),
    ],
)
async def test_the_mode_decides_what_is_loaded_at_start(
    make_core: MakeCore, add_model: AddModel, changes: dict[str, Any], expected: list[str]
) -> None:
    core = make_core(**changes)
    add_model("a", {1: 1})
    add_model("b", {1: 1})
    await core.control.follower.start()

    assert expected == [row.name for row in await core.control.catalog.index(ready=True)]


@pytest.mark.parametrize(("readiness", "expected"), [("startup", True), ("models", False)])
async def test_readiness_is_a_setting(
    make_core: MakeCore, add_model: AddModel, readiness: str, expected: bool
) -> None:
    """`startup`: ready once every load was attempted; `models`: once every load succeeded."""
    core = make_core(model_control_mode=ModelControlMode.POLL, readiness=Readiness(readiness))
    add_model("good", {1: 1})
    directory = add_model("bad", {1: 1})
    (directory / "1/amount.json").write_text("broken")

    assert not core.control.follower.server_ready

    await core.control.follower.start()

    assert expected is core.control.follower.server_ready

    add_model("bad", {1: 1})
    await core.control.follower.poll()

    assert core.control.follower.server_ready


async def test_polling_follows_the_repository(
    make_core: MakeCore, add_model: AddModel, world: World
) -> None:
    core = make_core(model_control_mode=ModelControlMode.POLL)
    add_model("kept", {1: 1})
    add_model("changed", {1: 1})
    add_model("gone", {1: 1})
    await core.control.follower.start()
    add_model("changed", {1: 2})
    add_model("new", {1: 3})
    shutil.rmtree(core.root / "gone")
    await core.control.follower.poll()

    assert ("1", 2.0) == await answer(core, "changed")
    assert ("1", 3.0) == await answer(core, "new")
    assert not core.registry.ready("gone")
    assert 1 == world.loads.count("kept/1")


# --- overrides ---


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, OutOfSpace),
        (errno.EDQUOT, OutOfSpace),
        (errno.EFBIG, OutOfSpace),
        (errno.EMFILE, OutOfFiles),
        (errno.ENFILE, OutOfFiles),
        (errno.EROFS, LoadFailed),
        (errno.EIO, LoadFailed),
    ],
)
@pytest.mark.parametrize("where", ["mkdtemp", "write_bytes"])
async def test_files_that_cannot_be_kept_leave_nothing_behind(
    core: Core,
    add_model: AddModel,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[Exception],
    where: str,
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    add_model("m", {1: 1})
    await core.control.load("m")
    monkeypatch.setattr(tempfile if where == "mkdtemp" else Path, where, fail)
    with pytest.raises(expected, match=os.strerror(number)):
        await core.control.load("m", override(7))

    assert [] == list(core.settings.scratch_directory.iterdir())
    assert ("1", 1.0) == await answer(core, "m")


def override(amount: Any, version: int = 1, **config: Any) -> dict[str, Any]:
    return {
        "config": json.dumps(config),
        f"file:{version}/amount.json": json.dumps(amount).encode(),
    }


async def test_files_of_a_load_replace_the_models_own(core: Core, add_model: AddModel) -> None:
    """Model repository extension, Load: the override directory, off the repository."""
    add_model("m", {1: 1})
    before = sorted(core.root.rglob("*"))
    await core.control.load("m", override(7, version=4))

    assert ("4", 7.0) == await answer(core, "m")
    assert before == sorted(core.root.rglob("*"))
    assert 1 == len(list(core.settings.scratch_directory.iterdir()))

    await core.control.unload("m")

    assert [] == list(core.settings.scratch_directory.iterdir())


async def test_files_that_a_client_sent_are_tried_before_they_are_loaded(
    core: Core, add_model: AddModel, world: World
) -> None:
    """They are tried in a disposable process; files of the repository are trusted."""
    add_model("m", {1: 1})
    await core.control.load("m")

    assert [] == world.tried

    with pytest.raises(LoadFailed, match="crashed the process that loaded it on trial"):
        await core.control.load("m", override("deadly"))

    assert (["m/1"], 1) == (world.loads, len(world.tried))
    assert ("1", 1.0) == await answer(core, "m")


async def test_a_load_without_files_returns_to_the_repository(
    core: Core, add_model: AddModel
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m", override(7))
    await core.control.load("m")

    assert ("1", 1.0) == await answer(core, "m")
    assert [] == list(core.settings.scratch_directory.iterdir())


async def test_a_failed_override_keeps_what_answered(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1})
    await core.control.load("m", override(7))
    with pytest.raises(LoadFailed):
        await core.control.load("m", override("no number") | {"file:1/amount.json": b"broken"})

    assert ("1", 7.0) == await answer(core, "m")
    assert 1 == len(list(core.settings.scratch_directory.iterdir()))


async def test_a_model_can_come_from_a_load_alone(core: Core) -> None:
    await core.control.load("fresh", override(3))

    assert ("1", 3.0) == await answer(core, "fresh")

    await core.control.unload("fresh")

    assert {} == await index(core)


async def test_a_config_of_a_load_replaces_the_models_own(core: Core, add_model: AddModel) -> None:
    add_model("m", {1: 1, 2: 2})
    await core.control.load("m", {"config": '{"versionPolicy": {"specific": {"versions": ["1"]}}}'})

    assert ("1", 1.0) == await answer(core, "m")


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"config": b"{}"}, InvalidParameter),
        ({"config": 1}, InvalidParameter),
        ({"file:1/x": "text", "config": "{}"}, InvalidParameter),
        ({"file:1/x": b""}, InvalidParameter),
        ({"unknown": "x"}, InvalidParameter),
        ({"file:1": b"", "config": "{}"}, InvalidParameter),
        ({"file:one/x": b"", "config": "{}"}, InvalidName),
        ({"file:../x": b"", "config": "{}"}, InvalidName),
        ({"file:1/../../x": b"", "config": "{}"}, InvalidName),
        ({"file:1//etc/x": b"", "config": "{}"}, InvalidName),
        ({"file:1/..": b"", "config": "{}"}, InvalidName),
        ({"file:1/a\0b": b"", "config": "{}"}, InvalidName),
        ({"file:1/x": b"12345", "config": "{}"}, TooLarge),
        ({"file:1/x": b"", "file:1/y": b"", "file:1/z": b"", "config": "{}"}, InvalidParameter),
        ({"config": "not json"}, LoadFailed),
        ({"config": '{"nonsense": 1}'}, LoadFailed),
        ({"config": '{"name": "other"}'}, LoadFailed),
    ],
)
async def test_bad_load_parameters_change_nothing(
    make_core: MakeCore, add_model: AddModel, parameters: dict[str, Any], error: type[Exception]
) -> None:
    core = make_core(max_override_bytes=4, max_override_files=2)
    add_model("m", {1: 1})
    before = sorted(core.root.parent.rglob("*"))
    with pytest.raises(error):
        await core.control.load("m", parameters)

    assert before == sorted(core.root.parent.rglob("*"))
    assert not core.registry.ready("m")


@pytest.mark.parametrize("parameters", [{"unload_dependents": "yes"}, {"other": True}])
async def test_bad_unload_parameters_are_refused(
    core: Core, add_model: AddModel, parameters: dict[str, Any]
) -> None:
    add_model("m", {1: 1})
    await core.control.load("m")
    with pytest.raises(InvalidParameter):
        await core.control.unload("m", parameters)

    assert core.registry.ready("m")


# --- what is on disk ---


async def test_a_link_out_of_the_repository_is_not_followed(
    core: Core, add_model: AddModel, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "amount.json").write_text("1")
    (core.root / "m").mkdir()
    (core.root / "m/1").symlink_to(outside)
    with pytest.raises(
        LoadFailed,
        match=r"is outside the model repository and every model_root \(--model-root\), or a link"
        " that leads outside",
    ):
        await core.control.load("m")


@pytest.mark.parametrize("name", ["1/labels", "1/below/labels"])
async def test_a_file_that_is_a_link_out_of_the_repository_is_refused(
    core: Core, add_model: AddModel, tmp_path: Path, name: str
) -> None:
    """It is refused before any loader opens it."""
    (tmp_path / "outside").write_text("hunter2")
    link = add_model("m", {1: 1}) / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "outside")

    with pytest.raises(LoadFailed, match="'labels' is outside the model repository"):
        await core.control.load("m")


async def test_a_link_into_another_allowed_root_is_followed(
    make_core: MakeCore, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "amount.json").write_text("1")
    core = make_core(model_root=(outside,))
    (core.root / "m").mkdir()
    (core.root / "m/1").symlink_to(outside)
    await core.control.load("m")

    assert ("1", 1.0) == await answer(core, "m")


async def test_a_pipe_is_not_a_model_file(core: Core, add_model: AddModel) -> None:
    """Opening it would block forever."""
    directory = add_model("m", {1: 1})
    os.mkfifo(directory / "1/pipe")
    with pytest.raises(LoadFailed, match="'pipe' is not a regular file"):
        await core.control.load("m")


async def test_a_model_without_versions_says_so(core: Core) -> None:
    (core.root / "m").mkdir()
    with pytest.raises(LoadFailed, match="no version directory"):
        await core.control.load("m")
