"""Loads that a mesh asks of its runtime: acceptance cases 5 to 10."""

import asyncio
import json
import shutil
import time
from pathlib import Path

import pytest
from grpclib.metadata import encode_grpc_message
from support import mesh
from support.conditions import until
from support.runtime import Runtime, StartRuntime
from support.shelf import (
    LARGE_BYTES,
    MIB,
    SLOW_ROWS,
    Shelf,
    addition,
    deep_rows,
    export_adder,
    sums,
)

WATCHED_SECONDS = 10
"""How long after its unload a model may not appear."""


# --- 5: ready means ready ----------------------------------------------------------------------


async def test_the_first_request_after_a_load_compiles_nothing(
    runtime: Runtime, models: Shelf, compilations: list[str]
) -> None:
    """Case 5: whatever its number of rows."""
    await runtime.mesh.load("m", models.path("slow"))
    loaded = len(compilations)
    answers = [
        await mesh.code(runtime.mesh.infer("m", deep_rows(rows))) for rows in (1, 5, 77, SLOW_ROWS)
    ]

    assert ["OK"] * 4 == answers
    assert 0 < loaded == len(compilations)


# --- 6: keys -----------------------------------------------------------------------------------

KEYS = {
    "empty": "",
    "blank": " \n",
    "empty object": "{}",
    "type as an object": '{"model_type": {"name": "jax", "version": "1"}}',
    "type without version": '{"model_type": {"name": "jax"}}',
    "type as a string": '{"model_type": "jax"}',
    "type of another kind": '{"model_type": [1]}',
    "unknown keys": '{"storage_key": "s3", "bucket": {"a": [null]}, "é": 1}',
    "disk size": '{"disk_size_bytes": 1234}',
    "disk size of another kind": '{"disk_size_bytes": "many", "schema_path": 7}',
}


@pytest.mark.parametrize("kind", ["mt:jax:1|pv:grpc-v2", "rt:x", ""])
async def test_keys_and_types_that_say_nothing_of_the_model(
    runtime: Runtime, models: Shelf, kind: str
) -> None:
    """Case 6: a load needs nothing but the path."""
    for name, key in KEYS.items():
        await runtime.mesh.load(name, models.path("plus-1"), key, kind)

        assert [2, 3] == sums(await runtime.mesh.infer(name, addition(1, 2)))


async def test_the_schema_of_a_key_takes_the_place_of_the_configuration(
    runtime: Runtime, models: Shelf
) -> None:
    """Case 6: one that fits changes nothing, one that does not is refused with what is wrong."""
    for name in ("schema", "wrong-schema"):
        key = json.dumps({"schema_path": str(models.path(f"{name}.json"))})
        answer = await mesh.outcome(runtime.mesh.load(name, models.path("configured"), key))
        if name == "schema":
            assert ("OK", "") == answer
    nowhere = json.dumps({"schema_path": str(models.path("nowhere.json"))})
    missing = await mesh.outcome(runtime.mesh.load("m", models.path("configured"), nowhere))

    assert "FAILED_PRECONDITION" == answer[0]
    assert "'x'" in answer[1]
    assert "nowhere.json" in missing[1]


@pytest.mark.parametrize("key", ["{", "nonsense", "[]", '"jax"', "1", "[" * 100_000, "{}" * 50_000])
async def test_a_key_that_is_no_json_object_leaves_nothing(
    runtime: Runtime, models: Shelf, key: str
) -> None:
    """Case 6: INVALID_ARGUMENT, before anything is done."""
    before = runtime.held()
    answer = await mesh.outcome(runtime.mesh.load("m", models.path("plus-1"), key))

    assert "INVALID_ARGUMENT" == answer[0]
    assert "modelKey" in answer[1]
    await until(lambda: before == runtime.held())
    assert [] == runtime.application.registry.models()


# --- 7: paths ----------------------------------------------------------------------------------

PATHS = {
    "plus-1/1": 1,  # a version
    "plus-2": 2,  # a model with one version
    "versioned": 10,  # the largest, as a number
    "configured": 4,  # as in a repository, under another name
    "single.jaxexp": 5,
    "plus-2/../plus-1/1/": 1,
}
"""Path -> what the model there adds."""


@pytest.mark.parametrize("path", PATHS)
async def test_a_path_leads_to_a_file_or_a_directory(
    runtime: Runtime, models: Shelf, path: str
) -> None:
    """Case 7: versioned or not, with a configuration or without."""
    await runtime.mesh.load("m", f"{models.root}/{path}")

    assert [PATHS[path], PATHS[path] + 1] == sums(await runtime.mesh.infer("m", addition(0, 1)))


@pytest.mark.parametrize("target", ["plus-1/1", "plus-1", "single.jaxexp"])
async def test_links_lead_anywhere_inside_the_allowed_roots(
    runtime: Runtime, models: Shelf, tmp_path: Path, target: str
) -> None:
    """Case 7: a volume is a link out of the directory of models."""
    link = tmp_path / "repository" / f"link-{Path(target).name}"
    link.symlink_to(models.path(target))

    assert "OK" == await mesh.code(runtime.mesh.load("m", link))


async def test_nothing_outside_of_the_allowed_roots_is_read(
    runtime: Runtime, models: Shelf, tmp_path: Path
) -> None:
    """Case 7: neither by a path, nor by a link, nor by a link below an honest directory."""
    outside = export_adder(tmp_path / "outside/1", 1)
    inside = tmp_path / "repository"
    (inside / "link").symlink_to(outside)
    (inside / "m/1").mkdir(parents=True)
    for file in outside.iterdir():
        (inside / "m/1" / file.name).symlink_to(file)
    answers = [
        await mesh.outcome(runtime.mesh.load("m", path))
        for path in (outside, inside / "link", inside / "m", inside / "../outside/1", "/etc/passwd")
    ]

    assert {"FAILED_PRECONDITION"} == {status for status, _ in answers}
    assert all(
        "is outside the model repository and every model_root (--model-root), or a link that"
        " leads outside" in text
        for _, text in answers
    )


async def test_of_what_lies_outside_it_is_not_told_whether_it_is_there(
    runtime: Runtime, tmp_path: Path
) -> None:
    """Neither by a path, nor by a link; a circle of links is no accident either."""
    (tmp_path / "there").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    texts = set()
    for name in ("there", "gone", "circle"):
        link = tmp_path / "repository" / f"to-{name}"
        link.symlink_to(tmp_path / name)
        for path in (tmp_path / name, link):
            status, text = await mesh.outcome(runtime.mesh.load("m", path))
            assert "FAILED_PRECONDITION" == status
            texts.add(text.replace(str(path), "PATH"))

    assert 1 == len(texts), texts


async def test_nothing_outside_is_read_as_a_configuration_or_a_schema(
    runtime: Runtime, models: Shelf, tmp_path: Path
) -> None:
    """Not a word of it is in the answer."""
    secret = tmp_path / "secret"
    secret.write_text("hunter2 is the password")
    model = tmp_path / "repository" / "m"
    shutil.copytree(models.path("plus-1/1"), model / "1")
    schema = model / "schema.json"
    schema.symlink_to(secret)
    key = json.dumps({"schema_path": str(schema)})
    answers = [await mesh.outcome(runtime.mesh.load("m", model / "1", key=key))]
    for name in ("config.json", "config.pbtxt"):
        (model / name).symlink_to(secret)
        answers.append(await mesh.outcome(runtime.mesh.load("m", model)))
        (model / name).unlink()

    assert ["FAILED_PRECONDITION"] * 3 == [status for status, _ in answers]
    assert all("(--model-root)" in text and "hunter2" not in text for _, text in answers)


@pytest.mark.parametrize("path", ["", "nowhere", "plus-1/1/nowhere", "a\0b", "x" * 5000, "empty"])
async def test_a_path_to_nothing_is_named(runtime: Runtime, models: Shelf, path: str) -> None:
    """Case 7: in an error that is not an accident."""
    full = f"{models.root}/{path}" if path else ""
    status, text = await mesh.outcome(runtime.mesh.load("m", full))

    assert status in ("FAILED_PRECONDITION", "INVALID_ARGUMENT")
    assert "internal" not in text
    assert path[:500] in text or "\0" in path or path == "empty"


async def test_a_relative_path_begins_in_the_repository(
    start: StartRuntime, models: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 7: wherever the server was started; it is confined as any other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plus-1").mkdir()
    async with start(repository=models.path("versioned"), model_root=()) as runtime:
        loaded = [await mesh.outcome(runtime.mesh.load("m", path)) for path in ("2", "../plus-1")]
        answer = await runtime.mesh.infer("m", addition(1, 2))

    assert ["OK", "FAILED_PRECONDITION"] == [code for code, _ in loaded]
    assert [3, 4] == sums(answer)


# --- 8: the same id again ----------------------------------------------------------------------


async def test_loading_what_is_loaded_is_no_error(
    runtime: Runtime, models: Shelf, compilations: list[str]
) -> None:
    """Case 8: the same size, and no memory or time is spent again."""
    first = await runtime.mesh.load("m", models.path("plus-1"))
    before, compiled = runtime.held(), len(compilations)
    second = await runtime.mesh.load("m", models.path("plus-1"))

    assert first == second
    await until(lambda: before == runtime.held())
    assert compiled == len(compilations)


async def test_an_id_with_another_path_is_replaced_at_once(runtime: Runtime, models: Shelf) -> None:
    """Case 8: every request in the meantime is served, by the old model or by the new one."""
    await runtime.mesh.load("m", models.path("plus-1"))
    before = runtime.held()
    loading = asyncio.ensure_future(mesh.code(runtime.mesh.load("m", models.path("plus-2"))))
    seen = []
    while not loading.done():
        seen += sums(await runtime.mesh.infer("m", addition()))
    seen += sums(await runtime.mesh.infer("m", addition()))

    assert "OK" == loading.result()
    assert {1, 2} == set(seen)
    assert sorted(seen) == seen
    await until(lambda: before == runtime.held())


async def test_loads_of_one_id_that_come_together_are_one(
    runtime: Runtime, models: Shelf, compilations: list[str]
) -> None:
    """Case 8: N loads, N times OK, one compilation."""
    calls = [runtime.mesh.load("m", models.path("plus-1")) for _ in range(10)]
    answers = await asyncio.gather(*calls)

    assert 1 == len(compilations)
    assert 1 == len({answer.sizeInBytes for answer in answers})


@pytest.mark.usefixtures("compilations")
@pytest.mark.slow
async def test_one_of_several_loads_may_be_cancelled(runtime: Runtime, models: Shelf) -> None:
    """Case 8: the others go on."""
    calls = [runtime.mesh.load("m", models.path("slow")) for _ in range(3)]
    waiting = [asyncio.ensure_future(mesh.code(call)) for call in calls[1:]]
    first = asyncio.ensure_future(mesh.code(calls[0]))
    await runtime.until_compiling("m")
    calls[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    assert ["OK", "OK"] == await asyncio.gather(*waiting)


# --- 9: failures -------------------------------------------------------------------------------

BROKEN = {
    "corrupt": "FAILED_PRECONDITION",
    "empty": "FAILED_PRECONDITION",
    "junk.jaxexp": "FAILED_PRECONDITION",
    "wrong-schema.json": "FAILED_PRECONDITION",
    "large": "RESOURCE_EXHAUSTED",
}
"""Path -> the status of a load within 100 MiB."""


@pytest.mark.parametrize("path", BROKEN)
async def test_a_load_that_fails_leaves_nothing(
    start: StartRuntime, models: Shelf, path: str
) -> None:
    """Case 9: an error that says why, and an unload that is OK."""
    capacity = 100 * MIB
    async with start(capacity_bytes=capacity, default_model_size_bytes=MIB) as runtime:
        before = runtime.held()
        answer = await mesh.outcome(runtime.mesh.load("m", models.path(path)))
        failed = runtime.held()
        inference = await mesh.outcome(runtime.mesh.infer("m", addition()))
        unloaded = await mesh.code(runtime.mesh.unload("m"))

        assert BROKEN[path] == answer[0]
        assert "'m'" in answer[1]
        assert before == failed == runtime.held()
        assert ("NOT_FOUND", True) == (inference[0], mesh.lost(inference))
        assert "OK" == unloaded
        assert [] == runtime.application.registry.models()


async def test_memory_that_runs_out_while_loading_comes_back(
    start: StartRuntime, models: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 9: a model that takes more than was predicted is let go again."""
    monkeypatch.setattr("xlaserve.runtime.loaders.predict_size", lambda *_, **__: {"cpu:0": MIB})
    capacity = LARGE_BYTES // 2
    async with start(capacity_bytes=capacity, default_model_size_bytes=MIB) as runtime:
        before = runtime.held()
        answer = await mesh.outcome(runtime.mesh.load("m", models.path("large")))

        assert "RESOURCE_EXHAUSTED" == answer[0]
        await until(lambda: before == runtime.held())
        assert "OK" == await mesh.code(runtime.mesh.unload("m"))


async def test_the_text_of_a_failure_fits_into_headers(runtime: Runtime) -> None:
    """Case 9: less than 2 KiB once it is encoded, whatever the id and the path."""
    model, path = "é" * 1000, "/\U0001f600" * 1000
    status, text = await mesh.outcome(runtime.mesh.load(model, path))

    assert "FAILED_PRECONDITION" == status
    assert 0 < len(encode_grpc_message(text)) <= 2048


# --- 10: cancelled loads -----------------------------------------------------------------------


async def cancelled(
    runtime: Runtime, path: Path, model: str = "m", sidecar: mesh.Mesh | None = None
) -> None:
    """Start a load, and reset its stream when it has compiled a part of its executables."""
    call = (sidecar or runtime.mesh).load(model, path)
    waiting = asyncio.ensure_future(mesh.code(call))
    await runtime.until_compiling(model, step=5)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.usefixtures("compilations")
@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["port:0"])
async def test_a_cancelled_load_never_comes_back(
    start: StartRuntime, models: Shelf, tmp_path: Path, endpoint: str
) -> None:
    """Case 10: the unload 500 ms later is OK when the loader has stopped; ten seconds long it is
    watched that nothing is served, then the ids load as if nothing had been.

    One was cancelled over TCP, one over a unix socket.
    """
    socket = f"unix:{tmp_path}/data.sock"
    async with start(grpc_data_endpoint=socket) as runtime, mesh.dial(socket) as other:
        before = runtime.held()
        sidecars = {"tcp": runtime.mesh, "unix": other}
        unloaded = []
        for model, sidecar in sidecars.items():
            await cancelled(runtime, models.path("slow"), model, sidecar)
            await asyncio.sleep(0.5)
            unloaded.append(await mesh.code(sidecar.unload(model)))
        after = runtime.held()
        answers = set()
        end = time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < end:
            for model in sidecars:
                answers.add(await mesh.code(runtime.mesh.infer(model, deep_rows())))
            await asyncio.sleep(0.1)

        assert ["OK", "OK"] == unloaded
        assert before == after == runtime.held()
        assert {"NOT_FOUND"} == answers
        for model, sidecar in sidecars.items():
            assert "OK" == await mesh.code(sidecar.load(model, models.path("slow")))
            assert "OK" == await mesh.code(runtime.mesh.infer(model, deep_rows()))


@pytest.mark.usefixtures("compilations")
async def test_an_unload_right_after_the_cancel_waits_for_the_loader(
    runtime: Runtime, models: Shelf
) -> None:
    """Case 10: OK means that no thread works on the model any more."""
    before = runtime.held()
    await cancelled(runtime, models.path("slow"))
    await runtime.mesh.unload("m")

    await until(lambda: before == runtime.held())
    assert [] == runtime.application.registry.models()


@pytest.mark.usefixtures("compilations")
async def test_a_load_right_after_the_cancel_succeeds(runtime: Runtime, models: Shelf) -> None:
    """Case 10: it is not joined to the one that was lost."""
    await cancelled(runtime, models.path("slow"))
    await runtime.mesh.load("m", models.path("plus-3"))

    assert [3, 3] == sums(await runtime.mesh.infer("m", addition()))


@pytest.mark.slow
async def test_a_load_that_waits_for_its_turn_is_cancelled_too(
    runtime: Runtime, models: Shelf, compilations: list[str]
) -> None:
    """Case 10: it never starts."""
    first = asyncio.ensure_future(mesh.code(runtime.mesh.load("first", models.path("slow"))))
    await runtime.until_compiling("first")
    second = runtime.mesh.load("second", models.path("plus-1"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await second
    await runtime.mesh.unload("second")

    assert "OK" == await first
    assert "NOT_FOUND" == await mesh.code(runtime.mesh.infer("second", addition()))
    assert ["first"] == [model.name for model in runtime.application.registry.models()]
