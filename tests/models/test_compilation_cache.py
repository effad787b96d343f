"""Compiled programs that outlive the process."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.monitoring
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from xlaserve.errors import InvalidSettings
from xlaserve.models import compilation_cache, jax_runtime
from xlaserve.models.compilation_cache import CompilationCache
from xlaserve.models.loaded import LoadedModel

Load = Callable[..., LoadedModel]

BUCKETS = 5
HIT = "/jax/compilation_cache/cache_hits"


def test_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    path = CompilationCache(tmp_path / "a" / "b", 100).prepare()

    assert tmp_path / "a" / "b" == path.parent
    assert 0o700 == stat.S_IMODE(path.stat().st_mode)
    assert path == CompilationCache(tmp_path / "a" / "b", 100).prepare()


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o777])
def test_directory_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    """What lies in it is executed."""
    cache = CompilationCache(tmp_path, 100)
    cache.prepare().chmod(mode)

    with pytest.raises(InvalidSettings, match=r"of this user alone \(mode 0700\)"):
        cache.prepare()


def test_link_is_refused(tmp_path: Path) -> None:
    cache = CompilationCache(tmp_path, 100)
    path = cache.prepare()
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InvalidSettings, match="of this user alone"):
        cache.prepare()


def test_directory_that_cannot_be_made_is_a_setting_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(InvalidSettings, match="^setting compilation_cache_directory: expected a"):
        CompilationCache(tmp_path / "file", 100).prepare()


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    path = CompilationCache(tmp_path, 100).prepare()
    for age, name in enumerate(("newest", "newer", "older", "oldest")):
        (path / name).write_bytes(bytes(40))
        os.utime(path / name, (1000 - age, 1000 - age))

    CompilationCache(tmp_path, 100).prepare()

    assert {"newest", "newer"} == {file.name for file in path.iterdir()}


def test_programs_of_other_processors_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One home directory serves many machines, and not all have the same instructions."""
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t: fpu sse avx1024\n")
    cache = CompilationCache(tmp_path / "cache", 100)
    ours = cache.prepare()
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "cpuinfo")

    assert ours != cache.prepare()


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[CompilationCache]:
    """The cache of this process, for the length of a test."""
    found = CompilationCache(tmp_path / "cache", 1 << 30)
    jax_runtime.start("cpu", found)
    reset_cache()
    yield found
    jax.config.update("jax_compilation_cache_dir", None)
    reset_cache()


@pytest.fixture
def hits() -> Iterator[list[str]]:
    """Collect what was found in the cache."""
    found: list[str] = []

    def listen(event: str, **_: object) -> None:
        if event == HIT:
            found.append(event)

    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)


def test_what_one_load_compiled_the_next_one_finds(
    affine_directory: Path, load: Load, cache: CompilationCache, hits: list[str]
) -> None:
    """Small as it is; and it counts as much memory."""
    first = load(affine_directory).info.memory
    before = len(hits)
    kept = sorted(cache.prepare().iterdir())

    assert BUCKETS <= len(kept)
    assert first == load(affine_directory).info.memory
    assert BUCKETS <= len(hits) - before
    assert kept == sorted(cache.prepare().iterdir())
