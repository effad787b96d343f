"""Fetches an object into a file: resumes, retries, hashes, can be cancelled."""

import hashlib
import io
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from xlaserve.storage.objects import (
    FetchCancelled,
    RangeIgnored,
    RemoteObject,
    Store,
    StoreProblem,
    ended_early,
)

ATTEMPTS = 5
"""Maximum number of consecutive attempts without progress."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_HASHED_AT_A_TIME = 1 << 20


class FetchCounts:
    """Counters of fetches, for metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fetched_bytes = 0
        self.seconds = 0.0
        """Total time spent on fetching models, in seconds."""
        self.models = 0
        self.failures = 0
        """Failed fetches, excluding cancelled ones."""
        self.retries = 0
        self.refused = 0
        """Requests that failed in all attempts, excluding those of file fetches."""

    def add(self, **counts: float) -> None:
        """Add to counts, by name."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class FetchControl:
    """The deadline of one fetch, and its cancellation."""

    def __init__(
        self,
        seconds: float,
        counts: FetchCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = counts or FetchCounts()
        self.done_bytes = 0
        """Number of bytes fetched so far."""
        self._seconds = seconds
        self._clock = clock
        self._until = clock() + seconds
        self._cancelled = threading.Event()
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Cancel the fetch before its next step."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise FetchCancelled after cancellation, or StoreProblem past the deadline."""
        if self._cancelled.is_set():
            raise FetchCancelled
        if self._clock() > self._until:
            raise StoreProblem(
                f"it was not fetched within {self._seconds:g} seconds (remote_fetch_seconds)",
                is_transient=False,
                is_away=True,
            )

    def arrived(self, size_bytes: int, *, resumed: bool = False) -> None:
        """Count fetched bytes; `resumed` bytes are from an earlier fetch."""
        self.counts.add(fetched_bytes=0 if resumed else size_bytes)
        with self._lock:
            self.done_bytes += size_bytes

    def pause(self, seconds: float) -> None:
        """Wait this long; raises like `check`, immediately on cancellation."""
        self._cancelled.wait(min(seconds, max(0.0, self._until - self._clock())))
        self.check()


def fetch_file(store: Store, found: RemoteObject, target: Path, control: FetchControl) -> str:
    """Fetch an object into a file and return its SHA-256; blocks.

    Resumes if the file contains the beginning of the object. Raises StoreProblem after ATTEMPTS
    attempts without progress, or for a permanent error.
    """
    # O_NOFOLLOW: the cache contains no links.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(target, flags, mode=0o600), "r+b", buffering=0) as file:
        download = _Download(store, found, file, control)
        download.run()
        os.fsync(file.fileno())
    return download.sha256


def read_part(
    store: Store, found: RemoteObject, part: tuple[int, int], control: FetchControl
) -> bytes:
    """Return an object's bytes between two offsets; blocks.

    Keeps the bytes in memory. Raises StoreProblem like `fetch_file`.
    """
    start, stop = part
    begin, failed = start, 0
    while True:
        control.check()
        got = bytearray()
        try:
            for piece in store.read(found, begin, stop):
                control.check()
                got += piece
            if len(got) == stop - begin:
                control.counts.add(fetched_bytes=len(got))
                return bytes(memoryview(got)[start - begin :])
            raise ended_early(found, begin + len(got))
        except RangeIgnored:
            # Read from the start and drop the bytes before the part: headers are short.
            begin = 0
        except StoreProblem as problem:
            failed += 1
            if not problem.is_transient or failed >= ATTEMPTS:
                control.counts.add(refused=int(problem.is_away))
                raise
            control.pause(pause_seconds(failed))
            control.counts.add(retries=1)


class _Download:
    """A download into a file that may already contain the beginning of the object."""

    def __init__(
        self, store: Store, found: RemoteObject, file: io.FileIO, control: FetchControl
    ) -> None:
        self._store = store
        self._found = found
        self._file = file
        self._control = control
        self._position = 0
        self._hashes: list[Any] = []
        """Running SHA-256, and the store's checksum if it provides one."""
        self._rehash()

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the bytes so far."""
        return str(self._hashes[0].hexdigest())

    def run(self) -> None:
        """Fetch the missing bytes, and retry as long as attempts make progress."""
        failed = furthest = 0
        while self._position < self._found.size_bytes:
            self._control.check()
            try:
                self._fetch()
            except RangeIgnored:
                self._restart()
            except StoreProblem as problem:
                # Reading the same bytes again, as with servers that send no ranges, is no progress.
                failed = 1 if self._position > furthest else failed + 1
                furthest = max(furthest, self._position)
                if not problem.is_transient or failed >= ATTEMPTS:
                    raise
                self._control.pause(pause_seconds(failed))
                self._control.counts.add(retries=1)
        self._store.confirm(self._found)
        self._check()

    def _fetch(self) -> None:
        for piece in self._store.read(self._found, self._position, self._found.size_bytes):
            self._control.check()
            self._append(piece)
        if self._position < self._found.size_bytes:
            raise ended_early(self._found, self._position)

    def _append(self, piece: bytes) -> None:
        if self._position + len(piece) > self._found.size_bytes:
            raise StoreProblem(
                f"'{self._found.name}' has more than the {self._found.size_bytes} bytes of the"
                " listing",
                is_transient=False,
            )
        rest = memoryview(piece)
        while rest:
            rest = rest[self._file.write(rest) :]
        for digest in self._hashes:
            digest.update(piece)
        self._position += len(piece)
        self._control.arrived(len(piece))

    def _check(self) -> None:
        checksum = self._found.checksum
        if checksum is not None and self._hashes[1].hexdigest() != checksum.value:
            # The data is corrupt: discard it, so that the next fetch starts over.
            self._restart()
            raise StoreProblem(
                f"'{self._found.name}' does not match the {checksum.algorithm} of its store",
                is_transient=False,
            )

    def _restart(self) -> None:
        self._control.arrived(-self._position, resumed=True)
        self._file.truncate(0)
        self._rehash()

    def _rehash(self) -> None:
        """Hash the file's contents; empties the file first if it is larger than the object."""
        checksum = self._found.checksum
        algorithms = ["sha256", *([checksum.algorithm] if checksum else [])]
        self._hashes = [hashlib.new(name, usedforsecurity=False) for name in algorithms]
        if os.fstat(self._file.fileno()).st_size > self._found.size_bytes:
            self._file.truncate(0)
        self._file.seek(0)
        self._position = 0
        while piece := self._file.read(_HASHED_AT_A_TIME):
            self._control.check()
            for digest in self._hashes:
                digest.update(piece)
            self._position += len(piece)
        self._control.arrived(self._position, resumed=True)


def pause_seconds(failed: int) -> float:
    """Return the pause after this many consecutive attempts without progress."""
    # Jitter: servers that lost the same store should not all retry at the same moment.
    longest: float = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**failed)
    return longest * random.uniform(0.5, 1.0)
