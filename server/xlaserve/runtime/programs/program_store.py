"""A shared store of compiled programs, read during loads and written afterwards.

Each object is one program: its JSON key, a line feed, and the program's bytes. Its name is a hash
of the whole key, so programs of other versions, flags or processors are separate objects, and any
number of servers may write. The store contains machine code: anyone with write access controls what
the server executes. A failing store never fails a load. Does not import JAX.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec
import structlog

from xlaserve.runtime.programs.compilation_cache import (
    MAX_KEY_BYTES,
    Entry,
    Key,
    Unusable,
    count_lookup,
    entry_of,
)
from xlaserve.runtime.programs.program_counts import ProgramCounts
from xlaserve.storage.fetching import FetchControl, read_part
from xlaserve.storage.objects import (
    FetchCancelled,
    ObjectStore,
    RangeIgnored,
    StoreProblem,
    WritableStore,
)

SETTING = "compilation_cache_url"
READ_ONLY = ("http", "https")
"""URL schemes of read-only stores."""

_SUFFIX = ".program"
_AWAY_SECONDS = 60.0
"""Time for which a slow or failing store is skipped; otherwise every program would wait for it."""
_OPENING_SECONDS = 30.0
"""Additional time for the first look-up, which imports the store's SDK."""
_MOST_LOOKUPS = 16
"""Maximum number of concurrent look-ups. One that hangs occupies its thread."""
_MOST_WAITING, _MOST_WAITING_BYTES = 256, 256 << 20
"""Maximum number and total bytes of programs queued for upload; further programs are skipped."""
_ATTEMPTS = 3
_RETRY_SECONDS = 1.0
_IDLE_SECONDS = 10.0
"""Idle time after which the upload thread ends."""

_log = structlog.get_logger("program_store")


@dataclass(frozen=True, slots=True)
class _Upload:
    name: str
    data: bytes
    is_again: bool


@dataclass(slots=True)
class _Lookup:
    """A look-up, on a thread that may hang."""

    control: FetchControl
    done: threading.Event = field(default_factory=threading.Event)
    found: Entry | Unusable | None = None
    problem: StoreProblem | None = None


class ProgramStore:
    """The program store at a validated URL. Thread-safe; connects on first use."""

    def __init__(
        self,
        url: str,
        open_store: Callable[[], ObjectStore],
        *,
        seconds: float,
        max_bytes: int,
        is_waited_for: bool = False,
    ) -> None:
        """`is_waited_for`: this process exists to fill the store, so no upload is skipped.

        `seconds` limits a look-up, `max_bytes` the size of a program.
        """
        self.url = url
        self.is_writable = urlsplit(url).scheme not in READ_ONLY
        self.counts = ProgramCounts()
        self.last_problem = ""
        """The store's error for the last program that could not be uploaded."""
        self._open_store = open_store
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._is_waited_for = is_waited_for
        self._opening = threading.Lock()
        self._store: ObjectStore | None = None
        self._lookups = threading.BoundedSemaphore(_MOST_LOOKUPS)
        self._away_until = 0.0
        self._changed = threading.Condition()
        """Guards the fields below."""
        self._waiting: deque[_Upload] = deque()
        self._waiting_bytes = 0
        """Total size of queued programs, including the one being uploaded."""
        self._writer: threading.Thread | None = None
        self._is_busy = False
        """Whether an upload is in progress."""
        self._is_failing = False
        """Whether the last upload failed; the failure has been logged."""
        self._is_denied = False
        """Whether the store denied a read; this has been logged."""
        self._is_closed = False

    def find(self, target: str, names: Sequence[str]) -> Entry | Unusable | None:
        """Return the first program found under these names, or why it is unusable.

        Returns None if there is no such program, or if the store does not answer in time, which is
        logged. Blocks for a few seconds at most.
        """
        began = time.perf_counter()
        found, was_answered = self._look_up(target, names)
        seconds = time.perf_counter() - began
        if was_answered:
            count_lookup(self.counts, found, seconds)
        else:
            self.counts.add(unanswered=1, seconds=seconds)
        return found

    def _look_up(self, target: str, names: Sequence[str]) -> tuple[Entry | Unusable | None, bool]:
        """Look up like `find`; also return whether the store answered."""
        if time.monotonic() < self._away_until or not self._lookups.acquire(timeout=self._seconds):
            return None, False
        more = 0.0 if self._store is not None else _OPENING_SECONDS
        lookup = _Lookup(FetchControl(self._seconds + more))
        arguments = (lookup, [_object_name(target, name) for name in names])
        threading.Thread(target=self._run_lookup, args=arguments, name="look", daemon=True).start()
        if not lookup.done.wait(self._seconds + more):
            lookup.control.cancel()
            self._leave_alone(f"no answer within {self._seconds:g} seconds ({SETTING}_seconds)")
            return None, False
        if lookup.problem is not None:
            self._not_read(lookup.problem)
            # A program that may not be read counts as missing.
            return None, not lookup.problem.is_transient
        return lookup.found, True

    def put(self, target: str, name: str, entry: Entry, *, is_again: bool = False) -> None:
        """Queue a program for upload by the upload thread; best effort.

        `is_again`: replace the existing object of this name, which is unusable.
        """
        data = msgspec.json.encode(Key.of(entry)) + b"\n" + entry.executable
        if not self.is_writable or len(data) > self._max_bytes:
            return
        with self._changed:
            if self._is_waited_for:
                self._changed.wait_for(lambda: self._is_closed or self._has_room(len(data)))
            if self._is_closed or not self._has_room(len(data)):
                self._failed("too many uploads are pending")
                return
            self._waiting.append(_Upload(_object_name(target, name), data, is_again))
            self._waiting_bytes += len(data)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="programs", daemon=True)
                self._writer.start()
            self._changed.notify_all()

    def flush(self, seconds: float | None = None) -> bool:
        """Wait until all queued programs are uploaded; tell whether that succeeded in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_busy, seconds)

    def close(self, seconds: float) -> None:
        """Refuse further programs; wait up to this many seconds for queued ones."""
        if not self.flush(seconds):
            _log.warning("compiled programs not stored", programs=len(self._waiting))
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    # --- reading ---

    def _run_lookup(self, lookup: _Lookup, names: Sequence[str]) -> None:
        try:
            lookup.found = self._first_stored(names, lookup.control)
        except StoreProblem as problem:
            lookup.problem = problem
        except FetchCancelled:
            pass
        # Any error of the SDK means that the store is unavailable.
        except BaseException as error:
            lookup.problem = StoreProblem(f"it failed with {type(error).__name__}")
        finally:
            self._lookups.release()
            lookup.done.set()

    def _first_stored(self, names: Sequence[str], control: FetchControl) -> Entry | Unusable | None:
        store = self._opened()
        for name in names:
            found = store.find(name)
            if found is None:
                continue
            if found.size_bytes > self._max_bytes:
                return Unusable(
                    f"it has {found.size_bytes} bytes, expected at most {self._max_bytes}"
                )
            try:
                return _entry(read_part(store, found, (0, found.size_bytes), control))
            except RangeIgnored:  # The request was for the object from its start.
                return Unusable("the store sent a different range")
        return None

    def _opened(self) -> ObjectStore:
        with self._opening:
            if self._store is None:
                self._store = self._open_store()
            return self._store

    def _not_read(self, problem: StoreProblem) -> None:
        if problem.is_transient:
            self._leave_alone(str(problem))
            return
        # Stores deny access to missing objects for clients that may not list them. Such answers are
        # fast, so keep using the store.
        if not self._is_denied:
            self._is_denied = True
            _log.warning("stored program not read", url=self.url, reason=str(problem))

    def _leave_alone(self, reason: str) -> None:
        self._away_until = time.monotonic() + _AWAY_SECONDS
        _log.warning(
            "program store paused",
            url=self.url,
            seconds=_AWAY_SECONDS,
            reason=reason,
        )

    # --- writing ---

    def _has_room(self, size: int) -> bool:
        """Tell whether a program may be queued. An empty queue accepts a program of any size."""
        if not self._waiting and not self._is_busy:
            return True
        is_small = self._waiting_bytes + size <= _MOST_WAITING_BYTES
        return is_small and len(self._waiting) < _MOST_WAITING

    def _write(self) -> None:
        while (upload := self._next()) is not None:
            problem = ""
            try:
                problem = self._written(upload)
            # The SDK may raise any error; the remaining queued programs must still be uploaded.
            except BaseException as error:
                problem = f"it failed with {type(error).__name__}"
            with self._changed:
                self._is_busy = False
                self._waiting_bytes -= len(upload.data)
                if problem:
                    self._failed(problem)
                else:
                    self._is_failing = False
                self._changed.notify_all()

    def _next(self) -> _Upload | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed, _IDLE_SECONDS)
            if not self._waiting:
                # Under the lock, so that the next program starts another thread.
                self._writer = None
                return None
            self._is_busy = True
            return self._waiting.popleft()

    def _written(self, upload: _Upload) -> str:
        """Upload a program unless it exists; return the error, or an empty string on success."""
        attempts = 1 if self._is_failing else _ATTEMPTS
        for attempt in range(1, attempts + 1):
            try:
                self._put(upload)
            except StoreProblem as problem:
                if not problem.is_transient or attempt == attempts or self._is_closed:
                    return str(problem)
                time.sleep(attempt * _RETRY_SECONDS)
            else:
                return ""
        return ""

    def _put(self, upload: _Upload) -> None:
        store = self._opened()
        if not upload.is_again and store.find(upload.name) is not None:
            return  # Another server uploaded an equal program first.
        assert isinstance(store, WritableStore)
        store.write(upload.name, upload.data)
        self.counts.add(written=1, written_bytes=len(upload.data))

    def _failed(self, reason: str) -> None:
        """Count a failed upload, and log the first of several. The caller holds the lock."""
        self.counts.add(failures=1)
        self.last_problem = reason
        if not self._is_failing:
            _log.warning("programs not uploaded", url=self.url, reason=reason)
        self._is_failing = True


def _object_name(target: str, name: str) -> str:
    return f"{target}/{name}{_SUFFIX}"


def _entry(data: bytes) -> Entry | Unusable:
    """Parse an object; return its entry, or why it is unusable."""
    end = data.find(b"\n", 0, MAX_KEY_BYTES)
    try:
        key = msgspec.json.decode(data[: max(end, 0)], type=Key)
    except (msgspec.MsgspecError, ValueError) as error:
        return Unusable(f"it cannot be read: {error}")
    return Unusable(key.problem) if key.problem else entry_of(key, data[end + 1 :])
