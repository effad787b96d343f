"""The directory in which compiled programs outlive the process."""

import dataclasses
import json
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from xlaserve.errors import InvalidSettings
from xlaserve.runtime.programs import compilation_cache
from xlaserve.runtime.programs.compilation_cache import CompilationCache, Entry, Unusable, processor

TARGET = "cpu-here"
ENTRY = Entry({"computation": "abc"}, {"jax": "1.2"}, b"machine code")


@pytest.fixture
def cache(tmp_path: Path) -> CompilationCache:
    """Return one that is prepared."""
    made = CompilationCache(tmp_path / "a" / "cache", 10_000)
    made.prepare(TARGET)
    return made


def files(cache: CompilationCache) -> dict[str, Path]:
    """Return its files by suffix."""
    return {path.suffix: path for path in (cache.directory / TARGET).iterdir()}


def reason(found: object) -> str:
    assert isinstance(found, Unusable)
    return found.reason


# --- the directory -----------------------------------------------------------------------------


def test_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    path = CompilationCache(tmp_path / "a" / "b", 100).prepare(TARGET)

    assert tmp_path / "a" / "b" == path.parent
    assert 0o700 == stat.S_IMODE(path.stat().st_mode)
    assert path == CompilationCache(tmp_path / "a" / "b", 100).prepare(TARGET)


@pytest.mark.parametrize("mode", [0o770, 0o701, 0o777])
def test_directory_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    """The server executes its contents."""
    cache = CompilationCache(tmp_path, 100)
    cache.prepare(TARGET).chmod(mode)

    with pytest.raises(
        InvalidSettings, match=r"a directory only this user can access \(mode 0700\),"
    ):
        cache.prepare(TARGET)


def test_directory_of_a_volume_that_hands_its_group_down_is_used(tmp_path: Path) -> None:
    """So are those that Kubernetes mounts with an fsGroup."""
    tmp_path.chmod(0o2770)

    path = CompilationCache(tmp_path, 100).prepare(TARGET)

    assert path.stat().st_mode & stat.S_ISGID
    assert path == CompilationCache(tmp_path, 100).prepare(TARGET)


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CompilationCache(tmp_path, 100).prepare(TARGET)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    with pytest.raises(InvalidSettings, match="it belongs to the user"):
        CompilationCache(tmp_path, 100).prepare(TARGET)


def test_link_is_refused(tmp_path: Path) -> None:
    cache = CompilationCache(tmp_path, 100)
    path = cache.prepare(TARGET)
    path.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InvalidSettings, match="expected a directory"):
        cache.prepare(TARGET)


def test_directory_that_cannot_be_made_is_a_setting_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = CompilationCache(tmp_path / "file", 100)

    with pytest.raises(InvalidSettings, match="^setting compilation_cache_directory: expected a"):
        cache.prepare(TARGET)

    cache.write(TARGET, "name", ENTRY)

    assert cache.read(TARGET, "name") is None


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    path = CompilationCache(tmp_path, 100).prepare(TARGET)
    for age, name in enumerate(("newest", "newer", "older", "oldest")):
        (path / name).write_bytes(bytes(40))
        os.utime(path / name, (1000 - age, 1000 - age))

    CompilationCache(tmp_path, 100).prepare(TARGET)

    assert {"newest", "newer"} == {file.name for file in path.iterdir()}


def test_directory_is_looked_through_again_when_something_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every load prepares it. What others write meanwhile counts then, too."""
    cache = CompilationCache(tmp_path, 1_500)
    path = cache.prepare(TARGET)
    looks: list[Path] = []
    list_files = compilation_cache._files

    def listed(directory: Path) -> Iterator[compilation_cache._File]:
        looks.append(directory)
        return list_files(directory)

    monkeypatch.setattr(compilation_cache, "_files", listed)
    cache.prepare(TARGET)
    before = len(looks)
    (path / "another's").write_bytes(bytes(1_500))
    os.utime(path / "another's", (1000, 1000))
    cache.write(TARGET, "name", ENTRY)
    cache.prepare(TARGET)

    assert (0, 1) == (before, len(looks))
    assert isinstance(cache.read(TARGET, "name"), Entry)
    assert not (path / "another's").exists()


def test_programs_of_other_processors_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that share a home directory may have different instruction sets."""
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t: fpu sse avx1024\n")
    ours = processor()
    monkeypatch.setattr(compilation_cache, "_CPU_INFO", tmp_path / "cpuinfo")

    assert ours != processor()


def test_a_cache_is_empty_until_it_is_prepared_and_has_a_file(tmp_path: Path) -> None:
    """Files in an unprepared directory are never used."""
    cache = CompilationCache(tmp_path, 10_000)
    found = [cache.is_empty]
    cache.prepare(TARGET)
    found.append(cache.is_empty)
    cache.write(TARGET, "name", ENTRY)
    found += [cache.is_empty, CompilationCache(tmp_path, 10_000).is_empty]

    assert [True, True, False, True] == found


# --- entries -----------------------------------------------------------------------------------


def test_entry_is_found_as_it_was_written(cache: CompilationCache) -> None:
    cache.write(TARGET, "name", ENTRY)

    assert ENTRY == cache.read(TARGET, "name")
    assert cache.read(TARGET, "other") is None
    assert cache.read("cpu-elsewhere", "name") is None


def test_its_key_is_a_file_that_people_can_read(cache: CompilationCache) -> None:
    cache.write(TARGET, "name", dataclasses.replace(ENTRY, is_ahead=True))

    found = json.loads((cache.directory / TARGET / "name.json").read_text())

    assert {"computation": "abc"} == found["program"]
    assert {"jax": "1.2"} == found["environment"]
    assert (True, len(ENTRY.executable)) == (found["ahead"], found["bytes"])
    assert f"{found['sha256']}.xla" == files(cache)[".xla"].name


def test_files_are_for_this_user_alone_and_nothing_else_is_left(cache: CompilationCache) -> None:
    cache.write(TARGET, "name", ENTRY)
    cache.write(TARGET, "name", ENTRY)

    modes = {stat.S_IMODE(path.stat().st_mode) for path in files(cache).values()}

    assert {0o600} == modes
    assert {".json", ".xla"} == set(files(cache))
    assert 2 == len(list((cache.directory / TARGET).iterdir()))


@pytest.mark.parametrize(
    ("suffix", "data", "expected"),
    [
        (".xla", b"machine code!", "its program differs from the one written"),
        (".xla", b"machine c0de", "its program differs from the one written"),
        (".xla", b"", "its program differs from the one written"),
        (".json", b"", "it cannot be read"),
        (".json", b"{}", "it cannot be read"),
        (".json", b"[" * 100_000, "it cannot be read"),
        (".json", b"\xff\xfe", "it cannot be read"),
    ],
)
def test_damaged_entry_is_not_used(
    cache: CompilationCache, suffix: str, data: bytes, expected: str
) -> None:
    cache.write(TARGET, "name", ENTRY)
    files(cache)[suffix].write_bytes(data)

    assert expected in reason(cache.read(TARGET, "name"))


def test_every_cut_and_every_flipped_byte_is_noticed(cache: CompilationCache) -> None:
    """Or the change has no effect: spaces in a key."""
    cache.write(TARGET, "name", ENTRY)
    whole = {path: path.read_bytes() for path in files(cache).values()}
    for path, data in whole.items():
        for at in range(len(data)):
            flipped = bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])
            for changed in (data[:at], flipped):
                path.write_bytes(changed)
                found = cache.read(TARGET, "name")
                same = isinstance(found, Entry) and found.executable == ENTRY.executable
                assert found is None or isinstance(found, Unusable) or same
        path.write_bytes(data)

    assert ENTRY == cache.read(TARGET, "name")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"format": 2}, "it is of format 2"),
        ({"sha256": "../" * 20 + "etc/passwd"}, "it is of format"),
        ({"more": 1}, "it cannot be read"),
        ({"sha256": "0" * 64}, None),
    ],
)
def test_key_of_another_make_is_not_used(
    cache: CompilationCache, changes: dict[str, object], expected: str | None
) -> None:
    """Nor does it lead anywhere else."""
    cache.write(TARGET, "name", ENTRY)
    path = files(cache)[".json"]
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    found = cache.read(TARGET, "name")

    assert found is None if expected is None else expected in reason(found)


@pytest.mark.parametrize("suffix", [".json", ".xla"])
def test_file_that_others_can_write_is_not_used(cache: CompilationCache, suffix: str) -> None:
    """Whoever wrote it could decide what this server executes."""
    cache.write(TARGET, "name", ENTRY)
    files(cache)[suffix].chmod(0o620)

    assert "other users can access it (mode 0620)" in reason(cache.read(TARGET, "name"))


@pytest.mark.parametrize("suffix", [".json", ".xla"])
def test_link_and_fifo_are_not_read(cache: CompilationCache, suffix: str, tmp_path: Path) -> None:
    cache.write(TARGET, "name", ENTRY)
    path = files(cache)[suffix]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    linked = cache.read(TARGET, "name")
    path.unlink()
    os.mkfifo(path, 0o600)
    fifo = cache.read(TARGET, "name")

    assert "it cannot be read" in reason(linked)
    assert "not a regular file" in reason(fifo)


@pytest.mark.parametrize("suffix", [".json", ".xla"])
def test_file_that_is_too_large_is_not_read(cache: CompilationCache, suffix: str) -> None:
    """A sparse file takes no disk space, but could exhaust memory."""
    cache.write(TARGET, "name", ENTRY)
    os.truncate(files(cache)[suffix], 1 << 40)

    assert f"it has {1 << 40} bytes, expected" in reason(cache.read(TARGET, "name"))


def test_directory_that_others_were_let_into_is_not_read(cache: CompilationCache) -> None:
    cache.write(TARGET, "name", ENTRY)
    (cache.directory / TARGET).chmod(0o770)

    assert "other users can access it (mode 0770)" in reason(cache.read(TARGET, "name"))


def test_what_was_read_last_stays_where_there_is_no_room(tmp_path: Path) -> None:
    """The size limit holds after every write, not only after the next start."""
    cache = CompilationCache(tmp_path, 6_000)
    cache.prepare(TARGET)
    for name in ("first", "second"):
        cache.write(TARGET, name, dataclasses.replace(ENTRY, executable=name.encode() * 400))
    for path in (tmp_path / TARGET).iterdir():
        os.utime(path, (1000, 1000))
    cache.read(TARGET, "first")
    # Not by the time of the last access alone, which not every file system keeps.
    assert 2 == sum(path.stat().st_mtime > 1000 for path in (tmp_path / TARGET).iterdir())
    cache.write(TARGET, "third", dataclasses.replace(ENTRY, executable=b"third" * 400))

    assert isinstance(cache.read(TARGET, "first"), Entry)
    assert cache.read(TARGET, "second") is None
    assert isinstance(cache.read(TARGET, "third"), Entry)
    assert sum(path.stat().st_size for path in (tmp_path / TARGET).iterdir()) <= 6_000


def test_what_is_larger_than_all_of_it_is_not_kept(tmp_path: Path) -> None:
    cache = CompilationCache(tmp_path, 1_000)
    cache.prepare(TARGET)
    cache.write(TARGET, "small", ENTRY)
    cache.write(TARGET, "large", dataclasses.replace(ENTRY, executable=bytes(1_000)))

    assert cache.read(TARGET, "large") is None
    assert ENTRY == cache.read(TARGET, "small")


def test_full_disk_is_logged_once_and_is_no_failure(
    cache: CompilationCache, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    cache.write(TARGET, "one", ENTRY)
    cache.write(TARGET, "two", ENTRY)

    printed = "".join(capfd.readouterr())

    assert cache.read(TARGET, "one") is None
    assert [] == list((cache.directory / TARGET).iterdir())
    assert 1 == printed.count("compiled programs not kept")


def test_a_disk_that_is_full_again_is_logged_again(
    cache: CompilationCache, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("one", "two"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            cache.write(TARGET, name, ENTRY)
        cache.write(TARGET, name, ENTRY)

    assert 2 == "".join(capfd.readouterr()).count("compiled programs not kept")
    assert ENTRY == cache.read(TARGET, "one") == cache.read(TARGET, "two")


def test_lookups_and_writes_are_counted(cache: CompilationCache) -> None:
    """By what was found, and with the bytes of the programs."""
    cache.write(TARGET, "one", ENTRY)
    cache.read(TARGET, "one")
    cache.read(TARGET, "another")
    next(iter(files(cache).values())).write_bytes(b"")
    cache.read(TARGET, "one")
    cache.directory.joinpath(TARGET).chmod(0o777)
    cache.write(TARGET, "third", ENTRY)
    counts = cache.counts

    assert (1, 1, 1, 0) == (counts.hits, counts.misses, counts.unusable, counts.unanswered)
    assert (1, 1) == (counts.written, counts.failures)
    assert len(ENTRY.executable) == counts.read_bytes == counts.written_bytes
    assert 0 < counts.seconds


def test_two_writers_of_one_name_leave_whole_entries(tmp_path: Path) -> None:
    """Two servers share the directory, and each evicts what the other wrote: a reader finds an
    entry of one of them, or none."""
    writers = [CompilationCache(tmp_path / "cache", 3_000) for _ in range(2)]
    for one in writers:
        one.prepare(TARGET)
    written = [replace(ENTRY, executable=bytes([65 + index]) * 900) for index in range(2)]
    ended = threading.Event()

    def write(index: int) -> None:
        for number in range(100):
            writers[index].write(TARGET, f"name{number % 3}", written[index])

    def write_both() -> None:
        threads = [threading.Thread(target=write, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()

    watcher = threading.Thread(target=write_both)
    watcher.start()
    found = [writers[0].read(TARGET, "name0")]
    while not ended.is_set():
        found.append(writers[0].read(TARGET, "name0"))
    watcher.join()

    assert [] == [one for one in found if one is not None and one not in written]
    assert any(found)
    assert [] == [path.name for path in (tmp_path / "cache" / TARGET).glob(".*")]
