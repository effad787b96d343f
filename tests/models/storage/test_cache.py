import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.memory_store import MemoryStore
from support.object_server import Handler, serving_objects

from xlaserve.errors import InvalidModel, InvalidSettings
from xlaserve.storage import cache, fetching
from xlaserve.storage.cache import Lease, ModelCache
from xlaserve.storage.fetching import FetchControl
from xlaserve.storage.http_store import HttpStore
from xlaserve.storage.objects import (
    Checksum,
    FetchCancelled,
    ObjectChanged,
    RemoteObject,
    StoreProblem,
)
from xlaserve.storage.units import RECORD, Wanted

MIB = 1 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less between attempts."""
    monkeypatch.setattr(fetching, "_FIRST_PAUSE_SECONDS", 0.001)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


Make = Callable[..., ModelCache]


@pytest.fixture
def make(folder: Path) -> Make:
    """Make the cache of one server; a second call stands for another process."""

    def made(max_bytes: int = 64 * MIB) -> ModelCache:
        cache = ModelCache(folder, max_bytes, 2)
        cache.prepare()
        return cache

    return made


def wanted(store: MemoryStore, model: str = "m") -> Wanted:
    objects = sorted(store.objects(), key=lambda found: found.name)
    return Wanted(model, f"mem://{model}", tuple(objects))


def of(size: int, fill: bytes = b"x") -> MemoryStore:
    return MemoryStore({"config.json": b"{}", "1/w": fill * size})


def take(made: ModelCache, store: MemoryStore, model: str = "m") -> Lease:
    return made.take(store, wanted(store, model), FetchControl(60))


def units(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


def test_what_is_fetched_is_there_whole(make: Make) -> None:
    store = of(3 * MIB)

    lease = take(make(), store)

    found = {
        str(p.relative_to(lease.path)): p.read_bytes() for p in lease.path.rglob("*") if p.is_file()
    }
    assert store.contents == found


def test_a_restarted_server_fetches_nothing_again(make: Make) -> None:
    store = of(MIB)
    take(make(), store).close()
    store.read_bytes.clear()
    after = make()

    take(after, store).close()

    assert {} == store.read_bytes
    assert 0 == after.counts.fetched_bytes


@pytest.mark.parametrize("kind", ["changed", "cut", "gone", "record"])
def test_a_damaged_file_is_fetched_again(make: Make, folder: Path, kind: str) -> None:
    """A file corrupted on disk between two processes is never loaded."""
    store = of(MIB)
    lease = take(make(), store)
    lease.close()
    file = lease.path / "1" / "w"
    damage: dict[str, Callable[[], object]] = {
        "changed": lambda: file.write_bytes(b"y" + store.contents["1/w"][1:]),
        "cut": lambda: os.truncate(file, 10),
        "gone": file.unlink,
        "record": lambda: (lease.path.parent / RECORD).write_text("{}"),
    }
    damage[kind]()
    store.read_bytes.clear()

    again = take(make(), store)

    assert store.contents["1/w"] == (again.path / "1" / "w").read_bytes()
    assert MIB == store.read_bytes["1/w"]


def test_another_object_of_the_same_name_is_another_unit(make: Make, folder: Path) -> None:
    made, store = make(), of(MIB)
    take(made, store)
    store.contents["1/w"] = b"z" * MIB

    assert b"z" * MIB == (take(made, store).path / "1" / "w").read_bytes()
    assert 2 == len(units(folder))


def test_two_loads_of_the_same_objects_fetch_them_once(make: Make) -> None:
    """In one server or in two that share a folder (single-flight)."""
    store = of(MIB)
    begun, may_read = threading.Event(), threading.Event()

    def wait(found: RemoteObject) -> None:
        begun.set()
        may_read.wait()

    store.on_read = wait
    one, other = make(), make()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(take, one, store)
        begun.wait()
        others = [pool.submit(take, one, store), pool.submit(take, other, store)]
        may_read.set()
        leases = [future.result() for future in (first, *others)]

    assert MIB == store.read_bytes["1/w"]
    assert 1 == len({lease.path for lease in leases})


def test_a_model_larger_than_the_cache_is_refused_before_a_byte_is_fetched(make: Make) -> None:
    store = of(MIB)

    with pytest.raises(
        InvalidModel, match=r"1048578 bytes, which exceeds .* \(remote_cache_max_bytes 1048576\)"
    ):
        take(make(MIB), store)
    assert {} == store.read_bytes


def test_the_least_recently_used_that_is_not_loaded_goes_first(make: Make, folder: Path) -> None:
    made = make(3 * MIB + 100)
    stores = {name: of(MIB, name.encode()) for name in "abcd"}
    leases = {name: take(made, stores[name], name) for name in "abc"}
    for seconds, name in enumerate("bca"):
        os.utime(leases[name].path.parent / "claim", (1000 + seconds, 1000 + seconds))
    # b is the oldest, and in use.
    leases["c"].close()
    leases["a"].close()

    take(made, stores["d"], "d")

    left = {name for name in "abc" if leases[name].path.exists()}
    assert {"a", "b"} == left


def test_what_is_in_use_by_another_server_stays(make: Make) -> None:
    one, other = make(2 * MIB), make(2 * MIB)
    used = take(one, of(MIB, b"a"), "a")
    more = of(MIB, b"b")

    with pytest.raises(InvalidModel, match="loaded and fetched models use 1048578 of"):
        take(other, more, "b")
    assert {} == more.read_bytes
    used.close()
    assert take(other, more, "b").path.exists()
    assert not used.path.exists()


def test_a_killed_fetch_is_nothing_whole_and_goes_on(make: Make, folder: Path) -> None:
    store = of(3 * MIB)
    control = FetchControl(60)

    def cancel(found: RemoteObject) -> None:
        if store.read_bytes.get("1/w", 0) >= 2 * MIB:
            control.cancel()

    store.on_read = cancel
    made = make()
    with pytest.raises(FetchCancelled):
        made.take(store, wanted(store), control)
    assert made.held(wanted(store)) is None
    assert 0 == made.counts.failures
    store.read_bytes.clear()
    store.on_read = lambda found: None

    lease = take(make(), store)

    assert store.contents["1/w"] == (lease.path / "1" / "w").read_bytes()
    assert store.read_bytes["1/w"] <= MIB


FETCH = """
import sys
from pathlib import Path
from xlaserve.storage.cache import ModelCache
from xlaserve.storage.fetching import FetchControl
from xlaserve.storage.http_store import HttpStore
from xlaserve.storage.units import Wanted

url, folder = sys.argv[1:]
store = HttpStore(url, seconds=60, max_objects=10)
cache = ModelCache(Path(folder), 1 << 30, 2)
cache.prepare()
objects = tuple(sorted(store.objects(), key=lambda found: found.name))
cache.take(store, Wanted("m", url, objects), FetchControl(600))
"""


def test_a_process_that_is_killed_leaves_nothing_that_is_taken_for_whole(
    make: Make, folder: Path
) -> None:
    """The next process continues the partial download with a range request (SIGKILL)."""
    content = bytes(range(256)) * 20_000

    def stall(handler: Handler, content: bytes) -> bool:
        start, stop = handler.part(len(content))
        if start or not handler.name.endswith("w"):
            return False
        handler.head(handler.name, stop - start)
        handler.wfile.write(content[:4_000_000])
        handler.wfile.flush()
        handler.shelves.released.wait()
        return True

    with serving_objects(**{"root/1/w": content, "root/c": b"{}"}) as (url, shelves):
        shelves.fault = stall
        command = [sys.executable, "-c", FETCH, url, str(folder)]
        with subprocess.Popen(command) as process:
            while not any(p.stat().st_size >= 4_000_000 for p in folder.glob("*/*/1/w")):
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        store = HttpStore(url, seconds=60, max_objects=10)
        objects = tuple(sorted(store.objects(), key=lambda found: found.name))
        row, made = Wanted("m", url, objects), make()
        assert made.held(row) is None

        lease = made.take(store, row, FetchControl(60))

    assert content == (lease.path / "1" / "w").read_bytes()
    last = ("GET", "root/1/w", f"bytes=4000000-{len(content) - 1}")
    assert last in shelves.asked


def test_leftovers_that_nobody_can_resume_are_removed_at_the_start(
    make: Make, folder: Path
) -> None:
    make()
    left = folder / ("0" * 40)
    (left / "partial-00000000").mkdir(parents=True)
    (left / "partial-00000000" / "w").write_bytes(b"x" * 100)

    make()

    assert not left.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
def test_a_full_disk_leaves_nothing_behind(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*args: object) -> None:
        raise OSError(number, "No space left on device")

    store, made = of(MIB), make()
    with monkeypatch.context() as patch:
        patch.setattr(fetching._Download, "_append", full)
        with pytest.raises(OSError, match="No space left"):
            take(made, store)
    assert [] == units(folder)
    assert 1 == made.counts.failures

    take(made, store)


def test_a_checksum_of_the_store_is_compared(make: Make) -> None:
    store = of(MIB)
    row = wanted(store)
    wrong = tuple(
        RemoteObject(found.name, found.size_bytes, found.mark, Checksum("md5", "0" * 32))
        for found in row.objects
    )

    with pytest.raises(StoreProblem, match="does not match the md5 of its store"):
        make().take(store, Wanted("m", row.url, wrong), FetchControl(60))


def test_an_object_that_changes_while_it_is_fetched_is_refused(make: Make) -> None:
    store = of(MIB)
    row = wanted(store)

    def change(found: RemoteObject) -> None:
        store.contents["1/w"] = b"z" * MIB

    store.on_read = change

    with pytest.raises(ObjectChanged, match="'1/w' changed while it was fetched"):
        make().take(store, row, FetchControl(60))
    assert make().held(row) is None


def test_a_fetch_has_a_deadline(make: Make) -> None:
    now = [0.0]
    store = of(3 * MIB)

    def later(found: RemoteObject) -> None:
        now[0] += 10

    store.on_read = later
    control = FetchControl(15, clock=lambda: now[0])

    with pytest.raises(StoreProblem, match="not fetched within 15 seconds"):
        make().take(store, wanted(store), control)


def test_a_server_that_stops_cancels_what_is_fetched(make: Make) -> None:
    store, made = of(MIB), make()
    begun, may_read = threading.Event(), threading.Event()

    def wait(found: RemoteObject) -> None:
        begun.set()
        may_read.wait()

    store.on_read = wait
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(take, made, store)
        begun.wait()
        made.close()
        may_read.set()

        with pytest.raises(FetchCancelled):
            fetch.result()


def test_nothing_is_fetched_behind_the_stop(make: Make) -> None:
    """Neither by a load about to begin, nor by one that waits for a thread."""
    store, made = of(MIB), make()
    made.close()

    with pytest.raises(FetchCancelled):
        take(made, store)


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    """Its files are loaded, including code."""
    folder.mkdir()
    folder.chmod(0o777)

    with pytest.raises(
        InvalidSettings, match="remote_cache_directory: expected a directory owned by this"
    ):
        ModelCache(folder, MIB, 1).prepare()


def test_progress_is_logged(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_PROGRESS_SECONDS", -1.0)
    store = of(MIB)
    may_read = threading.Event()
    store.on_read = lambda found: _ignore(may_read.wait())
    made = make()
    told: list[dict[str, object]] = []
    monkeypatch.setattr(made, "_log", _Log(told, may_read))

    take(made, store)

    assert "model fetch in progress" == told[0]["event"]
    assert "model fetched" == told[-1]["event"]


def _ignore(value: object) -> None:
    """Ignore a value."""


class _Log:
    def __init__(self, told: list[dict[str, object]], after: threading.Event) -> None:
        self._told = told
        self._after = after

    def info(self, event: str, **facts: object) -> None:
        self._told.append({"event": event, **facts})
        self._after.set()

    warning = info
