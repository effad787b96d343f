"""A private directory of compiled programs that outlives the process, limited in bytes.

Its files contain machine code that the server executes, so it only reads files that no other user
can have written, and models cannot choose names. An entry has two files: a readable JSON key, and
the program, named by its SHA-256. Both are written to a temporary file and renamed.
"""

import hashlib
import math
import os
import platform
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
import structlog

from xlaserve.errors import InvalidSettings
from xlaserve.runtime.programs.program_counts import ProgramCounts

SETTING = "compilation_cache_directory"
AUTOTUNE = "autotune"
"""Directory of XLA's autotuning results, next to the programs."""

FORMAT = 1
"""Version of the key files' format; entries of other versions are ignored."""

_PRIVATE = 0o700
_OF_OTHERS = 0o077
_WRITABLE_BY_OTHERS = 0o022
MAX_KEY_BYTES = 1 << 20
"""Longest key that is read or written."""
_KEPT_PART = 0.9
"""Fraction of the size limit that remains after an eviction, so that the next program fits."""

_NAME_CHARACTERS = 32
_SHA256 = re.compile("[0-9a-f]{64}")
_CPU_INFO = Path("/proc/cpuinfo")
_FEATURES = ("flags", "Features")
_AS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO would otherwise wait forever for a writer.
_AS_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_AS_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_log = structlog.get_logger("compilation_cache")


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled program with everything that it depends on."""

    program: Mapping[str, str]
    """The computation, shapes and devices."""
    environment: Mapping[str, str]
    """The compiler and target: versions, flags, kind of device."""
    executable: bytes
    is_ahead: bool = False
    """Whether the program was compiled without such a device, and has never run."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """Result of a look-up that found an entry which cannot be used."""

    reason: str


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON key of an entry, with the size and hash of the program's bytes."""

    format: int
    program: dict[str, str]
    environment: dict[str, str]
    ahead: bool
    sha256: str
    bytes: int

    @staticmethod
    def of(entry: Entry) -> "Key":
        """Return the key of an entry."""
        return Key(
            FORMAT,
            dict(entry.program),
            dict(entry.environment),
            entry.is_ahead,
            hashlib.sha256(entry.executable).hexdigest(),
            len(entry.executable),
        )

    @property
    def problem(self) -> str:
        """Return why the key is invalid, or an empty string if it is valid."""
        is_ours = self.format == FORMAT and _SHA256.fullmatch(self.sha256)
        return "" if is_ours else f"it is of format {self.format}, expected {FORMAT}"


def entry_of(key: Key, executable: bytes) -> Entry | Unusable:
    """Return the entry of a program, or why the program does not match its key."""
    if hashlib.sha256(executable).hexdigest() != key.sha256:
        return Unusable("its program differs from the one written")
    return Entry(key.program, key.environment, executable, key.ahead)


def count_lookup(counts: ProgramCounts, found: Entry | Unusable | None, seconds: float) -> None:
    """Count a look-up by its result and duration."""
    if found is None:
        counts.add(misses=1, seconds=seconds)
    elif isinstance(found, Entry):
        counts.add(hits=1, seconds=seconds, read_bytes=len(found.executable))
    else:
        counts.add(unusable=1, seconds=seconds)


class CompilationCache:
    """The compilation cache, by target and name, limited in bytes. Thread-safe."""

    def __init__(self, directory: Path, max_bytes: int, max_age_seconds: float = math.inf) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.max_age_seconds = max_age_seconds
        """Age in seconds at which unused programs are evicted."""
        self.counts = ProgramCounts()
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._bytes = 0
        """Total size of the files: the last count plus the bytes written by this process since."""
        self._is_prepared = False
        """Whether the cache has been prepared; until then, reads and writes do nothing."""
        self._is_written = False
        """Whether this process has written anything since the last count."""
        self._is_refusing = False
        """Whether the last write failed; only the first failure in a row is logged."""

    def prepare(self, target: str) -> Path:
        """Create the directory for a target's programs, evict down to the limit, and return it.

        Evicts the least recently used programs first. Raises InvalidSettings if the directory
        cannot be created, or is not private to this user.
        """
        path = self.directory / target
        try:
            path.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            with _opened(path):
                pass
        except PermissionError as error:
            expected = f"a directory only this user can access (mode 0700), {error.args[-1]}"
            raise InvalidSettings(SETTING, expected, path) from error
        except OSError as error:
            raise InvalidSettings(SETTING, f"a directory ({error.strerror})", path) from error
        with self._lock:
            # Called by every load. Other processes that write to the directory evict by themselves.
            if not self._is_prepared or self._is_written:
                self._prune(self.max_bytes)
            self._is_prepared, self._is_written = True, False
        return path

    @property
    def is_empty(self) -> bool:
        """Tell whether the cache has no entries; true until it has been prepared. Blocks."""
        return not self._is_prepared or next(_files(self.directory), None) is None

    def prepare_autotuning(self) -> None:
        """Create the directory for XLA's autotuning results; raises InvalidSettings."""
        self.prepare(AUTOTUNE)

    def read(self, target: str, *names: str) -> Entry | Unusable | None:
        """Return the first entry found under these names, or why it is unusable.

        Returns None if there is no such entry. Blocks.
        """
        if not self._is_prepared:
            return None
        began = time.perf_counter()
        found = next((one for name in names if (one := self._found(target, name))), None)
        count_lookup(self.counts, found, time.perf_counter() - began)
        return found

    def _found(self, target: str, name: str) -> Entry | Unusable | None:
        try:
            with _opened(self.directory / target) as directory:
                return self._read(directory, name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            return Unusable(f"it cannot be read: {error}")

    def latest(self, target: str, prefix: str) -> Key | None:
        """Return the newest key among names with this prefix. Blocks."""
        found = (self.directory / target).glob(_key_name(f"{prefix}*"))
        for path in sorted(found, key=_written, reverse=True):
            with suppress(OSError, ValueError), _opened(path.parent) as directory:
                return _key(directory, path.stem, is_used=False)
        return None

    def _read(self, directory: int, name: str) -> Entry | Unusable:
        key = _key(directory, name)
        if problem := key.problem:
            return Unusable(problem)
        executable = _trusted(directory, _executable_name(key.sha256), self.max_bytes)
        return entry_of(key, executable)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Yield every usable entry, with its target. Blocks."""
        for path in sorted(self.directory.glob(f"*/{_key_name('*')}")):
            found = self.read(path.parent.name, path.stem)
            if isinstance(found, Entry):
                yield path.parent.name, found

    def write(self, target: str, name: str, entry: Entry) -> None:
        """Store an entry, replacing any entry of this name; best effort. Blocks.

        Logs only the first of several failures in a row. Evicts the least recently used entries if
        the cache exceeds its limit.
        """
        key = Key.of(entry)
        text = msgspec.json.format(msgspec.json.encode(key), indent=1) + b"\n"
        size = len(text) + len(entry.executable)
        if size > self.max_bytes or len(text) > MAX_KEY_BYTES:
            return
        with self._lock:
            if not self._is_prepared:
                return
            try:
                self._make_room(size)
                (self.directory / target).mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
                with _opened(self.directory / target) as directory:
                    _replace(directory, _executable_name(key.sha256), entry.executable)
                    _replace(directory, _key_name(name), text)
                self._bytes += size
                self._is_written = True
                self._is_refusing = False
                self.counts.add(written=1, written_bytes=len(entry.executable))
            except OSError as error:
                self.counts.add(failures=1)
                if not self._is_refusing:
                    _log.warning("compiled programs not kept", reason=str(error))
                self._is_refusing = True

    def _make_room(self, size: int) -> None:
        if self._bytes + size > self.max_bytes:
            self._prune(min(self.max_bytes - size, int(self.max_bytes * _KEPT_PART)))

    def _prune(self, most: int) -> None:
        files = sorted(_files(self.directory), key=lambda file: file.used)
        self._bytes = sum(file.size for file in files)
        oldest = time.time() - self.max_age_seconds
        for file in files:
            if self._bytes <= most and file.used >= oldest:
                return
            # Another server with the same directory may have removed the file, or the directory may
            # be read-only.
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
            self._bytes -= file.size


def name_of(described: Mapping[str, str]) -> str:
    """Return the file name of a program's entry."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(described.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_CHARACTERS]


def processor() -> str:
    """Identify the processor: its programs may not run on another processor."""
    return _described(_CPU_INFO)


@cache
def _described(info: Path) -> str:
    # Machines may share a home directory, and XLA uses every instruction set that the CPU has.
    try:
        lines = info.read_text().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith(_FEATURES)), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


# --- files -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    size: int
    used: float


def _files(directory: Path) -> Iterator[_File]:
    for path in directory.glob("*/*"):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(found.st_mode):
            yield _File(path, found.st_size, max(found.st_atime, found.st_mtime))


def _written(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _key(directory: int, name: str, *, is_used: bool = True) -> Key:
    text = _trusted(directory, _key_name(name), MAX_KEY_BYTES, is_used=is_used)
    return msgspec.json.decode(text, type=Key)


def _key_name(name: str) -> str:
    return f"{name}.json"


def _executable_name(sha256: str) -> str:
    return f"{sha256}.xla"


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a directory that only this user can access, within a block; raises OSError."""
    # Check the open descriptor, so that the path cannot be replaced after the check.
    descriptor = os.open(path, _AS_DIRECTORY)
    try:
        _check_owned(os.fstat(descriptor), _OF_OTHERS)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_owned(found: os.stat_result, others: int) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(f"it belongs to the user {found.st_uid}")
    if found.st_mode & others:
        raise PermissionError(f"other users can access it (mode {stat.S_IMODE(found.st_mode):04o})")


def _trusted(directory: int, name: str, limit: int, *, is_used: bool = True) -> bytes:
    """Read a file that only this user can have written; raises OSError or ValueError."""
    with os.fdopen(os.open(name, _AS_FILE, dir_fd=directory), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        _check_owned(found, _WRITABLE_BY_OTHERS)
        if found.st_size > limit:
            raise ValueError(f"it has {found.st_size} bytes, expected at most {limit}")
        # Some file systems do not record access times.
        if is_used:
            with suppress(OSError):
                os.utime(file.fileno())
        return file.read(limit)


def _replace(directory: int, name: str, data: bytes) -> None:
    """Write a file atomically."""
    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with os.fdopen(os.open(temporary, _AS_NEW, 0o600, dir_fd=directory), "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
