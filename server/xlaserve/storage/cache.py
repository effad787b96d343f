"""The cache of fetched models, a bounded directory that servers share. Methods block."""

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import structlog

from xlaserve.errors import InvalidModel, InvalidSettings
from xlaserve.errors.panics import answering
from xlaserve.files.temporary import remove_leftovers
from xlaserve.storage.fetching import FetchControl, FetchCounts, fetch_file
from xlaserve.storage.objects import FetchCancelled, Store, StoreProblem
from xlaserve.storage.units import Unit, Wanted

SETTING = "remote_cache_directory"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk or quota, which would affect other writers as well."""
_LOCK = "lock"
_BUSY_SECONDS = 0.05
_POLL_SECONDS = 0.2
_PROGRESS_SECONDS = 10.0
_END_SECONDS = 60.0
"""Time in seconds that cancelled reads from a hanging store may take to end."""


class Lease:
    """Keeps a unit's files in the cache until it is closed."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.path = unit.files

    def close(self) -> None:
        """Allow the files to be evicted; idempotent."""
        self._unit.close()


class ModelCache:
    """An LRU cache of fetched models, bounded in bytes.

    Two loads of the same objects fetch them once, in one process or in two.
    """

    def __init__(self, directory: Path, max_bytes: int, threads: int) -> None:
        """`threads` is the number of concurrent downloads."""
        self.directory = directory
        self.counts = FetchCounts()
        self._max_bytes = max_bytes
        self._downloads = ThreadPoolExecutor(threads, "download")
        self._verified: set[str] = set()
        """Units whose hashes this process has verified, by reading or fetching all files."""
        self._open: set[FetchControl] = set()
        self._lock = threading.Lock()
        self._log = structlog.get_logger("storage")

    @property
    def fetching(self) -> int:
        """Return the number of fetches in progress."""
        with self._lock:
            return len(self._open)

    def prepare(self) -> None:
        """Create the directory; remove incomplete units of killed processes that cannot be resumed.

        Raises InvalidSettings if other users may write to the directory, because the server loads
        its contents.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.directory.stat()
        except OSError as error:
            expected = f"a writable directory ({error.strerror})"
            raise InvalidSettings(SETTING, expected, str(self.directory)) from None
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            expected = "a directory owned by this user and writable by nobody else"
            raise InvalidSettings(SETTING, expected, str(self.directory))
        count = remove_leftovers(self.directory)
        for unit in self._units():
            if unit.lock(shared=False) and not unit.is_whole and not unit.is_resumable():
                unit.remove()
                count += 1
            unit.close()
        if count:
            self._log.info("leftovers of killed fetches removed", count=count)

    def close(self) -> None:
        """Cancel all fetches, and refuse later ones."""
        with self._lock:
            for control in self._open:
                control.cancel()
        self._downloads.shutdown(wait=False, cancel_futures=True)

    def check_size(self, size_bytes: int) -> None:
        """Raise InvalidModel for a model larger than the whole cache."""
        if size_bytes > self._max_bytes:
            raise InvalidModel(
                f"its files have {size_bytes} bytes, which exceeds the cache for fetched models"
                f" (remote_cache_max_bytes {self._max_bytes})"
            )

    def held(self, wanted: Wanted) -> Lease | None:
        """Return the cached files if they are complete and intact; fetches nothing."""
        try:
            unit = Unit(self.directory / wanted.digest)
        except OSError:
            return None
        if not unit.lock(shared=True) or not unit.is_whole:
            unit.close()
            return None
        if not self._is_sound(unit, wanted):
            self._discard(unit, wanted)
            return None
        with suppress(OSError):
            unit.touch()
        return Lease(unit)

    def take(self, store: Store, wanted: Wanted, control: FetchControl) -> Lease:
        """Return a lease on the files, after fetching any that are missing.

        Raises StoreProblem, FetchCancelled, OSError from the disk, and InvalidModel if the model
        does not fit into the cache.
        """
        self.check_size(wanted.size_bytes)
        with self._following(control):
            while True:
                control.check()
                lease = self.held(wanted)
                if lease is not None:
                    return lease
                unit = self._exclusive(wanted)
                if unit is None:
                    # Another load, here or in another server, is fetching the same unit.
                    control.pause(_BUSY_SECONDS)
                    continue
                try:
                    if not unit.is_whole:
                        self._fill(unit, wanted, store, control)
                finally:
                    unit.close()

    @contextmanager
    def _following(self, control: FetchControl) -> Iterator[None]:
        with self._lock:
            self._open.add(control)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(control)

    def _is_sound(self, unit: Unit, wanted: Wanted) -> bool:
        """Tell whether the files match their recorded hashes; reads them once per process."""
        if wanted.digest in self._verified:
            return unit.has_sizes(wanted)
        if not unit.is_sound(wanted):
            return False
        self._verified.add(wanted.digest)
        return True

    def _discard(self, unit: Unit, wanted: Wanted) -> None:
        """Remove a unit whose files were modified, even if in use: open files remain readable."""
        self._verified.discard(wanted.digest)
        self._log.warning("cached files modified since the fetch", model=wanted.model)
        # Units are only removed under this lock or an exclusive lock on the unit, so the path
        # cannot refer to a newly fetched unit.
        with self._claiming():
            if unit.lock(shared=True):
                unit.remove()
        unit.close()

    def _exclusive(self, wanted: Wanted) -> Unit | None:
        path = self.directory / wanted.digest
        path.mkdir(mode=0o700, exist_ok=True)
        try:
            unit = Unit(path)
        except FileNotFoundError:
            return None
        if unit.lock(shared=False):
            return unit
        unit.close()
        return None

    # --- fetching ---

    def _fill(self, unit: Unit, wanted: Wanted, store: Store, control: FetchControl) -> None:
        self._make_room(unit, wanted)
        started = time.monotonic()
        try:
            hashes = self._download(unit, wanted, store, control)
            unit.finish(unit.partial(), hashes, wanted.url)
        except FetchCancelled:
            raise
        except BaseException as error:
            self.counts.add(failures=1)
            if isinstance(error, OSError) and error.errno in _FULL:
                # A partial unit would keep the disk full for all writers; fetching it again is
                # cheaper.
                unit.remove()
            raise
        finally:
            seconds = time.monotonic() - started
            self.counts.add(seconds=seconds)
        self._verified.add(wanted.digest)
        self.counts.add(models=1)
        self._log.info(
            "model fetched",
            model=wanted.model,
            url=wanted.url,
            size_bytes=wanted.size_bytes,
            seconds=round(seconds, 3),
        )

    def _download(
        self, unit: Unit, wanted: Wanted, store: Store, control: FetchControl
    ) -> dict[str, str]:
        """Fetch all files, several concurrently; return their hashes by name."""
        directory = unit.partial()
        running: dict[Future[str], str] = {}
        try:
            for found in wanted.objects:
                target = directory / found.name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                fetch = partial(fetch_file, store, found, target, control)
                running[self._begin(fetch)] = found.name
            self._wait(running, wanted, control)
        except BaseException as error:
            control.cancel()
            # The unit must stay locked as long as a download writes to it.
            writing = [future for future in running if not future.cancel()]
            if wait(writing, _END_SECONDS).not_done:
                unit.remove()
            if isinstance(error, StoreProblem):
                store.failed(error)
            raise
        return {name: future.result() for future, name in running.items()}

    def _begin(self, fetch: Callable[[], str]) -> Future[str]:
        try:
            return self._downloads.submit(answering(fetch))
        except RuntimeError:
            raise FetchCancelled from None  # the server is stopping

    def _wait(self, running: dict[Future[str], str], wanted: Wanted, control: FetchControl) -> None:
        reported = time.monotonic()
        left = set(running)
        while left:
            done, left = wait(left, _POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                if future.cancelled():
                    raise FetchCancelled  # the server is stopping
                future.result()
            control.check()
            if time.monotonic() - reported > _PROGRESS_SECONDS:
                reported = time.monotonic()
                self._log.info(
                    "model fetch in progress",
                    model=wanted.model,
                    fetched_bytes=control.done_bytes,
                    size_bytes=wanted.size_bytes,
                )

    # --- eviction ---

    def _make_room(self, own: Unit, wanted: Wanted) -> None:
        """Evict other units until this one fits, and claim its bytes; raises InvalidModel."""
        with self._claiming():
            units = [unit for unit in self._units() if unit.path != own.path]
            try:
                used = sum(unit.claimed_bytes for unit in units)
                # Evict incomplete units first: they serve no model yet.
                units.sort(key=lambda unit: (unit.is_whole, unit.used_at))
                for unit in units:
                    if used + wanted.size_bytes <= self._max_bytes:
                        break
                    size = unit.claimed_bytes
                    if unit.lock(shared=False):
                        unit.remove()
                        used -= size
                        self._log.info("cached model evicted", unit=unit.path.name, size_bytes=size)
            finally:
                for unit in units:
                    unit.close()
            if used + wanted.size_bytes > self._max_bytes:
                raise InvalidModel(
                    f"its files have {wanted.size_bytes} bytes, but loaded and fetched models use"
                    f" {used} of {self._max_bytes} bytes of the cache (remote_cache_max_bytes)"
                )
            own.claim(wanted.size_bytes)

    @contextmanager
    def _claiming(self) -> Iterator[None]:
        """Hold the lock for claiming bytes, across processes, within a block."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.directory / _LOCK, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _units(self) -> list[Unit]:
        found = []
        for path in self.directory.iterdir():
            if not path.name.startswith(".") and path.name != _LOCK:
                with suppress(OSError):
                    found.append(Unit(path))
        return found
