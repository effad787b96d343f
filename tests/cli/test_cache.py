"""`xlaserve cache list` and `prune`, and servers of two versions that share a directory."""

import json
import os
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from xlaserve.cli import application
from xlaserve.runtime.programs.compilation_cache import CompilationCache, Entry, name_of
from xlaserve.runtime.programs.kept_programs import ProgramKey

DAY = 86_400.0
TARGET = "cpu-x86_64"
SIZE = 1000


def _place(program: str, jax: str, threads: str = "2") -> ProgramKey:
    described = {"computation": program}
    environment = {"jax": jax, "jaxlib": jax, "platform": "cpu", "threads": threads}
    return ProgramKey(TARGET, name_of(described), described, environment)


def _fill(
    cache: CompilationCache, jax: str, programs: int, days: float = 0, threads: str = "2"
) -> list[ProgramKey]:
    """Write programs as a server of a version does, last used this many days ago."""
    places = [_place(f"p{number}", jax, threads) for number in range(programs)]
    before = set(cache.directory.glob("*/*"))
    for place in places:
        data = f"{jax}{place.name}".encode().ljust(SIZE)
        cache.write(TARGET, place.names[0], Entry(place.program, place.environment, data))
    then = time.time() - days * DAY
    for path in set(cache.directory.glob("*/*")) - before:
        os.utime(path, (then, then))
    return places


def _found(cache: CompilationCache, places: list[ProgramKey]) -> int:
    return sum(isinstance(cache.read(TARGET, *place.names), Entry) for place in places)


@pytest.fixture
def cache(tmp_path: Path) -> CompilationCache:
    made = CompilationCache(tmp_path / "cache", 1 << 20)
    made.prepare(TARGET)
    return made


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(application(), ["cache", *map(str, arguments)])


def _listed(cache: CompilationCache) -> dict[str, Any]:
    lines = _run("list", cache.directory, "--json").output.splitlines()
    return {one["jax"]: one["programs"] for one in map(json.loads, lines)}


def test_two_versions_find_all_of_theirs_in_turn(cache: CompilationCache) -> None:
    """Both have the same programs: those of the first survive a start of the other."""
    older = _fill(cache, "0.10.0", 5)
    newer = _fill(cache, "0.12.0", 5)

    found = [_found(cache, places) for places in (older, newer, older, newer)]
    files = len(list(cache.directory.glob("*/*")))
    for jax, places in (("0.10.0", older), ("0.12.0", newer)):
        for place in places:
            entry = cache.read(TARGET, *place.names)
            assert isinstance(entry, Entry)
            assert jax == entry.environment["jax"]
    assert [5, 5, 5, 5] == found
    assert 20 == files


def test_two_hosts_find_all_of_theirs_in_turn_and_each_is_listed(cache: CompilationCache) -> None:
    """The same version with other thread counts: neither can use the other's programs."""
    small = _fill(cache, "0.12.0", 5, threads="2")
    large = _fill(cache, "0.12.0", 5, threads="64")

    found = [_found(cache, places) for places in (small, large, small, large)]
    rows = [
        json.loads(line) for line in _run("list", cache.directory, "--json").output.splitlines()
    ]
    assert [5, 5, 5, 5] == found
    assert {"2": 5, "64": 5} == {one["environment"]["threads"]: one["programs"] for one in rows}


def test_what_an_older_build_wrote_is_found(cache: CompilationCache) -> None:
    """Older builds named entries by their programs only."""
    place = _place("p", "0.12.0")
    cache.write(TARGET, place.name, Entry(place.program, place.environment, b"x"))

    assert 1 == _found(cache, [place])


def test_list_has_a_row_for_each_environment(cache: CompilationCache) -> None:
    _fill(cache, "0.10.0", 2, days=3)
    _fill(cache, "0.12.0", 3)

    text = _run("list", cache.directory).output

    assert {"0.10.0": 2, "0.12.0": 3} == _listed(cache)
    assert "has 5 programs of 2 environments" in text
    assert text.index("0.12.0") < text.index("0.10.0")


@pytest.mark.parametrize(
    ("flags", "left"),
    [
        (("--days", 2), {"0.12.0": 3}),
        (("--days", 9), {"0.10.0": 2, "0.12.0": 3}),
        (("--max-bytes", 0), {}),
        (("--max-bytes", 4 * SIZE), {"0.12.0": 3}),
        (("--days", 2, "--dry-run"), {"0.10.0": 2, "0.12.0": 3}),
        (("--other-versions",), {}),
    ],
)
def test_prune_removes_what_is_said(
    cache: CompilationCache, flags: tuple[object, ...], left: dict[str, int]
) -> None:
    _fill(cache, "0.10.0", 2, days=3)
    _fill(cache, "0.12.0", 3)

    result = _run("prune", cache.directory, *flags)

    assert 0 == result.exit_code, result.output
    assert left == _listed(cache)
    assert 2 * sum(left.values()) == len(list(cache.directory.glob("*/*")))


def test_prune_keeps_the_versions_that_are_installed(cache: CompilationCache) -> None:
    _fill(cache, "0.0.1", 2)
    place = _place("own", metadata.version("jax"))
    own = {**place.environment, "jaxlib": metadata.version("jaxlib")}
    cache.write(TARGET, place.names[0], Entry(place.program, own, b"x"))

    _run("prune", cache.directory, "--other-versions")

    assert {metadata.version("jax"): 1} == _listed(cache)


def test_bytes_of_two_keys_stay_with_the_one_that_is_left(cache: CompilationCache) -> None:
    places = [_place("p", version) for version in ("0.0.1", metadata.version("jax"))]
    for place in places:
        environment = {**place.environment, "jaxlib": metadata.version("jaxlib")}
        cache.write(TARGET, place.names[0], Entry(place.program, environment, b"same"))

    _run("prune", cache.directory, "--other-versions")

    assert [0, 1] == [_found(cache, [place]) for place in places]


def test_prune_has_to_be_told_what_to_remove(cache: CompilationCache) -> None:
    result = _run("prune", cache.directory)

    assert 2 == result.exit_code
    assert "--max-bytes, --days or --other-versions" in result.output


def test_programs_that_nobody_used_for_long_are_removed_at_a_start(tmp_path: Path) -> None:
    first = CompilationCache(tmp_path / "cache", 1 << 20, 2 * DAY)
    first.prepare(TARGET)
    old, young = _fill(first, "0.10.0", 2, days=3), _fill(first, "0.12.0", 2, days=1)

    second = CompilationCache(tmp_path / "cache", 1 << 20, 2 * DAY)
    second.prepare(TARGET)

    assert [0, 2] == [_found(second, places) for places in (old, young)]
