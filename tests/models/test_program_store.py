"""Compiled programs in a store shared by servers, with any behavior of the store."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from xlaserve.runtime.programs import cache_key, program_store
from xlaserve.runtime.programs.compilation_cache import Entry, Unusable
from xlaserve.runtime.programs.kept_programs import ProgramKey
from xlaserve.runtime.programs.program_store import ProgramStore
from xlaserve.storage.objects import ObjectChanged, RemoteObject, StoreProblem


class Panic(BaseException):
    """A BaseException, as raised by Rust libraries."""


ENTRY = Entry({"computation": "abc"}, {"jax": "1.2"}, b"machine\ncode", is_ahead=True)
TARGET, NAME = "cpu-here", "0123abcd"
OBJECT = f"{TARGET}/{NAME}.program"
DENIED = StoreProblem("access is denied", is_transient=False)


class Shelf:
    """A store in memory, with failures on demand."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.read_problem: BaseException | None = None
        self.write_problems: list[BaseException] = []
        """Errors raised by the next writes."""
        self.asked: list[str] = []
        self.writes: list[str] = []
        self.gate = threading.Event()
        """While it is cleared, all requests wait."""
        self.gate.set()

    def look(self) -> None:
        """Do nothing: the store is available."""

    def find(self, name: str) -> RemoteObject | None:
        self.asked.append(name)
        self.gate.wait()
        if self.read_problem is not None:
            raise self.read_problem
        data = self.objects.get(name)
        return None if data is None else RemoteObject(name, len(data), "mark")

    def read(self, found: RemoteObject, start: int, stop: int) -> Iterator[bytes]:
        yield self.objects[found.name][start:stop]

    def confirm(self, found: RemoteObject) -> None:
        raise ObjectChanged(found.name)

    def failed(self, problem: StoreProblem) -> None:
        """Do nothing: its attempts are not recorded."""

    def write(self, name: str, data: bytes) -> None:
        self.gate.wait()
        if self.write_problems:
            raise self.write_problems.pop(0)
        self.writes.append(name)
        self.objects[name] = data


Make = Callable[..., ProgramStore]


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    made = Shelf()
    yield made
    made.gate.set()


@pytest.fixture
def make(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Create stores backed by the shelf, which are closed after the test."""
    monkeypatch.setattr(program_store, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(program_store, "_OPENING_SECONDS", 0.0)
    made: list[ProgramStore] = []

    def store(url: str = "s3://bucket/programs", **more: object) -> ProgramStore:
        settings = {"seconds": 60.0, "max_bytes": 10_000, **more}
        made.append(ProgramStore(url, lambda: shelf, **settings))  # type: ignore[arg-type, return-value]
        return made[-1]

    yield store
    shelf.gate.set()
    for one in made:
        one.close(10)


def put(store: ProgramStore, entry: Entry = ENTRY, **more: bool) -> None:
    """Store a program, and wait until the upload has ended."""
    store.put(TARGET, NAME, entry, **more)

    assert store.flush(60)


def reason(found: object) -> str:
    assert isinstance(found, Unusable)
    return found.reason


# --- intact programs -----------------------------------------------------------------------------


def test_program_is_found_as_it_was_put(make: Make, shelf: Shelf) -> None:
    """Another server finds it; the object begins with a readable key."""
    put(make())
    found = make().find(TARGET, ["another", NAME])
    key, _, executable = shelf.objects[OBJECT].partition(b"\n")

    assert ENTRY == found
    assert {"computation": "abc"} == json.loads(key)["program"]
    assert ENTRY.executable == executable
    assert make().find("cpu-elsewhere", [NAME]) is None


def test_program_that_is_there_is_not_written_again(make: Make, shelf: Shelf) -> None:
    """An unusable program is replaced."""
    first, second = make(), make()
    put(first)
    put(second, replace(ENTRY, executable=b"as good"))
    before = make().find(TARGET, [NAME])
    put(second, replace(ENTRY, executable=b"better"), is_again=True)

    assert ENTRY == before
    assert 2 == len(shelf.writes)
    assert replace(ENTRY, executable=b"better") == make().find(TARGET, [NAME])


def test_two_writers_at_once_leave_one_whole_program(make: Make, shelf: Shelf) -> None:
    """Both have looked for the program before either has written it."""
    shelf.gate.clear()
    writers = [make(), make()]
    written = [replace(ENTRY, executable=bytes([65 + at]) * 900) for at in range(2)]
    for one, entry in zip(writers, written, strict=True):
        one.put(TARGET, NAME, entry)
    while len(shelf.asked) < 2:
        time.sleep(0.001)
    shelf.gate.set()
    assert all(one.flush(60) for one in writers)

    assert make().find(TARGET, [NAME]) in written
    assert [0, 0] == [one.counts.failures for one in writers]


def test_programs_of_other_environments_have_other_names() -> None:
    """So no version overwrites another version's programs."""
    program = {"computation": "abc"}
    first = ProgramKey(TARGET, NAME, program, {"platform": "cpu", "jaxlib": "1"})
    second = ProgramKey(TARGET, NAME, program, {"platform": "cpu", "jaxlib": "2"})

    assert 1 == len(first.names_in_store)
    assert first.names_in_store != second.names_in_store


def test_program_for_a_gpu_may_have_been_made_without_one() -> None:
    here = {"platform": "cuda", "platform_version": "12.9"}
    ahead = here | {"platform_version": cache_key.UNKNOWN}
    places = [ProgramKey(TARGET, NAME, {}, environment) for environment in (here, ahead)]

    assert places[1].names_in_store[0] == places[0].names_in_store[1]
    assert 2 == len(set(places[0].names_in_store))
    assert 1 == len(places[1].names_in_store)


# --- damaged programs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[:-1], "its program differs from the one written"),
        (lambda data: data + b"x", "its program differs from the one written"),
        (lambda data: data[:-1] + b"f", "its program differs from the one written"),
        (lambda data: b"", "it cannot be read"),
        (lambda data: b"\n" + data, "it cannot be read"),
        (lambda data: data.replace(b"\n", b""), "it cannot be read"),
        (lambda data: b"\xff" * 2_000, "it cannot be read"),
        (lambda data: data.replace(b'"format":1', b'"format":2'), "it is of format 2"),
    ],
)
def test_damaged_object_is_not_used(
    make: Make, shelf: Shelf, damage: Callable[[bytes], bytes], expected: str
) -> None:
    put(make())
    shelf.objects[OBJECT] = damage(shelf.objects[OBJECT])

    assert expected in reason(make().find(TARGET, [NAME]))


def test_object_that_is_too_large_is_not_fetched(make: Make, shelf: Shelf) -> None:
    shelf.objects[OBJECT] = bytes(10_001)
    shelf.read = None  # type: ignore[method-assign, assignment]

    assert "it has 10001 bytes, expected at most 10000" == reason(make().find(TARGET, [NAME]))


def test_program_that_is_too_large_is_not_put_there(make: Make, shelf: Shelf) -> None:
    put(make(), replace(ENTRY, executable=bytes(10_000)))

    assert {} == shelf.objects


def test_lookups_are_counted_by_what_they_found(make: Make, shelf: Shelf) -> None:
    """A denied request counts as a miss, because S3 does not distinguish the two."""
    put(make())
    store = make()
    store.find(TARGET, [NAME])
    store.find("cpu-elsewhere", [NAME])
    shelf.read_problem = DENIED
    store.find(TARGET, [NAME])
    shelf.read_problem = None
    shelf.objects[OBJECT] = b""
    store.find(TARGET, [NAME])
    shelf.read_problem = StoreProblem("it is cut")
    for _ in range(2):
        store.find(TARGET, [NAME])
    counts = store.counts

    assert (1, 2, 1, 2) == (counts.hits, counts.misses, counts.unusable, counts.unanswered)
    assert len(ENTRY.executable) == counts.read_bytes
    assert 0 < counts.seconds


# --- unavailable store ---------------------------------------------------------------------------


def test_store_that_hangs_is_waited_for_once(
    make: Make, shelf: Shelf, capfd: pytest.CaptureFixture[str]
) -> None:
    put(make())
    store = make(seconds=0.05)
    shelf.gate.clear()
    found = [store.find(TARGET, [NAME]) for _ in range(5)]
    asked = shelf.asked.count(OBJECT)
    shelf.gate.set()

    assert [None] * 5 == found
    assert 2 == asked, "with that of the writer"
    printed = "".join(capfd.readouterr())
    assert 1 == printed.count("program store paused")
    assert "no answer within 0.05 seconds (compilation_cache_url_seconds)" in printed


def test_store_that_was_away_is_asked_again(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "_AWAY_SECONDS", 0.0)
    put(make())
    store = make()
    shelf.read_problem = StoreProblem("its SDK failed with Whatever")
    first = store.find(TARGET, [NAME])
    shelf.read_problem = None

    assert (None, ENTRY) == (first, store.find(TARGET, [NAME]))


@pytest.mark.parametrize(
    "problem",
    [StoreProblem("it is cut"), ValueError("of an SDK"), OSError(), Panic("of an SDK")],
)
def test_store_that_fails_is_left_alone(
    make: Make, shelf: Shelf, problem: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    shelf.read_problem = problem
    store = make()

    assert [None, None] == [store.find(TARGET, [NAME]) for _ in range(2)]
    assert 1 == len(shelf.asked)
    assert "of an SDK" not in "".join(capfd.readouterr())


def test_denied_program_is_no_reason_to_ask_for_no_other(
    make: Make, shelf: Shelf, capfd: pytest.CaptureFixture[str]
) -> None:
    """S3 denies access to missing objects for clients that may not list them."""
    put(make())
    store = make()
    shelf.read_problem = DENIED
    first = [store.find(TARGET, [NAME]) for _ in range(2)]
    shelf.read_problem = None

    assert [None, None] == first
    assert ENTRY == store.find(TARGET, [NAME])
    assert 1 == "".join(capfd.readouterr()).count("stored program not read")


def test_store_that_cannot_be_opened_is_away(make: Make) -> None:
    def fails() -> Shelf:
        raise ImportError

    store = ProgramStore("s3://b/p", fails, seconds=60, max_bytes=10)  # type: ignore[arg-type]

    assert store.find(TARGET, [NAME]) is None


# --- writing -----------------------------------------------------------------------------------


def test_write_that_fails_is_tried_again(make: Make, shelf: Shelf) -> None:
    shelf.write_problems = [StoreProblem("it is cut")] * 2
    store = make()
    put(store)

    assert [OBJECT] == shelf.writes
    assert (1, 0) == (store.counts.written, store.counts.failures)


@pytest.mark.parametrize("problem", [DENIED, RuntimeError("secret"), Panic("secret")])
def test_write_that_is_refused_is_logged_once(
    make: Make, shelf: Shelf, problem: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    shelf.write_problems = [problem] * 3
    store = make()
    for _ in range(3):
        put(store)
    put(store)
    printed = "".join(capfd.readouterr())

    assert (3, 1) == (store.counts.failures, store.counts.written)
    assert 1 == printed.count("programs not uploaded")
    assert "secret" not in printed


def test_no_more_wait_than_may(make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller, a server's load, does not wait."""
    monkeypatch.setattr(program_store, "_MOST_WAITING", 3)
    shelf.gate.clear()
    store = make()
    store.put(TARGET, "0", ENTRY)
    while not shelf.asked:
        time.sleep(0.001)
    for number in range(1, 10):
        store.put(TARGET, str(number), ENTRY)
    shelf.gate.set()

    assert store.flush(60)
    assert [f"{TARGET}/{number}.program" for number in range(4)] == shelf.writes
    assert 6 == store.counts.failures


def test_bytes_that_wait_are_bounded(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "_MOST_WAITING_BYTES", 5_000)
    shelf.gate.clear()
    store = make()
    for number in range(5):
        store.put(TARGET, str(number), replace(ENTRY, executable=bytes(2_000)))
    shelf.gate.set()

    assert store.flush(60)
    assert (2, 3) == (len(shelf.writes), store.counts.failures)


def test_bytes_that_were_written_do_not_wait_any_more(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "_MOST_WAITING_BYTES", 7_000)
    store = make()
    for number in range(5):
        store.put(TARGET, str(number), replace(ENTRY, executable=bytes(2_000)))
        assert store.flush(60)
    shelf.gate.clear()
    for number in range(5, 8):
        store.put(TARGET, str(number), replace(ENTRY, executable=bytes(2_000)))
    shelf.gate.set()

    assert store.flush(60)
    assert (8, 0) == (len(shelf.writes), store.counts.failures)


def test_command_that_fills_a_store_leaves_nothing_out(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "_MOST_WAITING", 1)
    store = make(is_waited_for=True)
    for number in range(20):
        store.put(TARGET, str(number), ENTRY)

    assert store.flush(60)
    assert (20, 0) == (len(shelf.writes), store.counts.failures)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nothing_is_put_where_a_server_can_only_read(make: Make, shelf: Shelf, scheme: str) -> None:
    put(make())
    store = make(f"{scheme}://host/programs")
    store.put(TARGET, "other", ENTRY)

    assert store.flush(60)
    assert ENTRY == store.find(TARGET, [NAME])
    assert [OBJECT] == shelf.writes


@contextmanager
def hung(shelf: Shelf) -> Iterator[None]:
    shelf.gate.clear()
    yield
    shelf.gate.set()


def test_end_of_a_server_does_not_wait_for_a_store_that_hangs(
    make: Make, shelf: Shelf, capfd: pytest.CaptureFixture[str]
) -> None:
    store = make()
    with hung(shelf):
        store.put(TARGET, NAME, ENTRY)
        store.put(TARGET, "other", ENTRY)
        store.close(0.05)
        store.put(TARGET, "late", ENTRY)

    assert store.flush(60)
    assert [OBJECT] == shelf.writes, "the one that was being written"
    assert "compiled programs not stored" in "".join(capfd.readouterr())


def test_writer_that_was_idle_is_started_again(
    make: Make, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "_IDLE_SECONDS", 0.0)
    store = make()
    for number in range(3):
        store.put(TARGET, str(number), ENTRY)
        assert store.flush(60)

    assert 3 == len(shelf.writes)
