"""JAX functions that call libraries, served by a process that never lowers anything."""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

import itertools
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
import pytest
from support import jax_functions
from support.http import ask
from support.jax_functions import MATRIX, VECTOR
from support.process import ServerProcess, command, run, served

Calls = Mapping[str, jax_functions.Call]

COMPACT = (
    ("jax.numpy.linalg", "eigvalsh"),
    ("jax.numpy.linalg", "solve"),
    ("jax.numpy.fft", "fft"),
    ("jax.random", "uniform"),
)
"""One function per library, for quick runs: a library's kernels are registered together."""


def _compact() -> dict[str, Calls]:
    rows = jax_functions.calls()
    return {"compact": {name: rows[module][name] for module, name in COMPACT}}


def _computed(calls: Calls, a: Any, v: Any) -> dict[str, Any]:
    found = {name: jax_functions.arrays(call(a, v)) for name, call in calls.items()}
    return {f"{name}.{n}": array for name, rows in found.items() for n, array in rows.items()}


def _export(root: Path, modules: Mapping[str, Calls]) -> None:
    """Write models as jax.export files, which needs no compilation."""
    tensors = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (MATRIX, VECTOR)]
    for module, calls in modules.items():
        version = root / module / "1"
        version.mkdir(parents=True)
        exported = jax.export.export(jax.jit(partial(_computed, calls)), platforms=["cpu"])
        (version / "model.jaxexp").write_bytes(exported(*tensors).serialize())
        (version / "names.json").write_text('{"inputs": ["a", "v"]}')


def _expected(calls: Calls) -> dict[str, Any]:
    computed = jax.jit(lambda a, v: _computed(calls, a, v))(MATRIX, VECTOR)
    return {name: np.asarray(array) for name, array in computed.items()}


async def _answers(server: ServerProcess, module: str) -> dict[str, Any]:
    inputs = [
        {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.tolist()}
        for name, array in (("a", MATRIX), ("v", VECTOR))
    ]
    body = json.dumps({"inputs": inputs}).encode()
    found = await ask(server.http, "POST", f"/v2/models/{module}/infer", body=body)
    assert 200 == found.status, found.body
    return {
        one["name"]: np.array(one["data"], float).reshape(one["shape"])
        for one in found.json["outputs"]
    }


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    assert expected.keys() == found.keys()
    return [
        name
        for name, array in expected.items()
        if not np.allclose(found[name], array, rtol=1e-3, atol=1e-4, equal_nan=True)
    ]


@pytest.fixture
def any_types() -> Iterator[None]:
    """Use JAX's default type promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


async def _check_served(
    root: Path, cache: Path, modules: Mapping[str, Calls], processes: int
) -> None:
    """Serve and infer three times: with an empty cache first, then from the cache."""
    expected = {module: _expected(calls) for module, calls in modules.items()}
    flags = ("--compile-processes", str(processes), "--scratch-directory", str(root.parent))
    for _ in range(2):
        async with served(root, *flags, programs=str(cache)) as server:
            for module in modules:
                for _ in range(3):
                    differing = _differing(expected[module], await _answers(server, module))
                    assert [] == differing, module
            assert 0 == await server.stop()


@pytest.mark.usefixtures("any_types")
async def test_libraries_are_ready_in_a_process_that_lowers_nothing(tmp_path: Path) -> None:
    """Another process compiles, and the next server loads the programs from the cache."""
    modules = _compact()
    _export(tmp_path / "models", modules)

    await _check_served(tmp_path / "models", tmp_path / "cache", modules, 1)


_PART = 8
"""Number of functions per program."""

GROUPS = {
    "numpy": ("jax.numpy.linalg", "jax.numpy.fft"),
    "lax": ("jax.lax.linalg",),
    "random": ("jax.random",),
    "linalg": ("jax.scipy.linalg", "jax.scipy.sparse"),
    "special": ("jax.scipy.special",),
    "stats": ("jax.scipy.stats",),
}
"""Modules per server, by name prefix; `others` has the rest."""


def _group(name: str) -> str:
    return next((group for group, begin in GROUPS.items() if name.startswith(begin)), "others")


def _parts(name: str, calls: Calls) -> Iterator[tuple[str, Calls]]:
    """Split a module's functions into programs that XLA compiles in seconds.

    All of jax.scipy.special in one program take over seven minutes; separately, one minute.
    """
    rest = iter(calls.items())
    for number in itertools.count():
        part = dict(itertools.islice(rest, _PART))
        if not part:
            return
        yield f"{name}.{number}", part


@pytest.mark.slow
@pytest.mark.usefixtures("any_types")
@pytest.mark.parametrize("group", [*GROUPS, "others"])
@pytest.mark.parametrize("processes", [0, 1])
async def test_every_function_is_served_cold_and_from_its_cache(
    tmp_path: Path, processes: int, group: str
) -> None:
    modules = {name: rows for name, rows in jax_functions.calls().items() if group == _group(name)}
    modules = {part: rows for name in modules for part, rows in _parts(name, modules[name])}
    _export(tmp_path / "models", modules)

    await _check_served(tmp_path / "models", tmp_path / "cache", modules, processes)


@pytest.mark.slow
@pytest.mark.usefixtures("any_types")
async def test_what_checks_and_warms_loads_as_a_server_does(tmp_path: Path) -> None:
    """`check` and `warm` run in processes that never lower; a server uses the warm cache."""
    modules = _compact()
    _export(tmp_path / "models", modules)
    cache = tmp_path / "cache"
    models = str(tmp_path / "models")
    checked = await run(*command("repo", "check", models, "--json"))
    warmed = await run(*command("warm", models, "--cache", str(cache), "--target", "cpu", "--json"))

    assert [0, 0] == [checked[0], warmed[0]], (checked, warmed)
    assert {"works"} == {json.loads(line)["finding"] for line in checked[1].splitlines()}
    assert {""} == {json.loads(line)["problem"] for line in warmed[1].splitlines()}
    flags = ("--compile-processes", "1", "--scratch-directory", str(tmp_path))
    async with served(tmp_path / "models", *flags, programs=str(cache)) as server:
        for module, calls in modules.items():
            assert [] == _differing(_expected(calls), await _answers(server, module))
        assert 0 == await server.stop()


def _arrays(call: jax_functions.Call, a: Any, v: Any) -> Any:
    return jax_functions.arrays(call(a, v))


@pytest.mark.slow
def test_every_function_has_an_example() -> None:
    """A function new in JAX must fit its module's rule or get a row."""
    jax_functions.calls.cache_clear()
    failed = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for module, calls in jax_functions.calls().items():
            for name, call in calls.items():
                try:
                    jax.eval_shape(partial(_arrays, call), MATRIX, VECTOR)
                except (TypeError, ValueError, AttributeError) as error:
                    failed[f"{module}.{name}"] = str(error)

    assert {} == failed
