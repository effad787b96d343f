"""A private, bounded directory of compiled programs that outlive the process.

What lies in it is machine code that is executed, so it is read only where nobody but this user can
have written it, and no model names it. An entry is two files: a key in JSON, which people can read,
and what it names by its sha256. Both are renamed into place whole.
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
"""Part of the most bytes that an eviction leaves, so that the next program fits."""

_NAME_CHARACTERS = 32
_SHA256 = re.compile("[0-9a-f]{64}")
_CPU_INFO = Path("/proc/cpuinfo")
_FEATURES = ("flags", "Features")
_AS_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: to open a FIFO would otherwise wait for its other end for ever.
_AS_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_AS_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_log = structlog.get_logger("compilation_cache")


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled program, with everything it depends on."""

    program: Mapping[str, str]
    """Its computation, shapes and devices."""
    environment: Mapping[str, str]
    """Its compiler and its target: versions, flags, kind of device."""
    executable: bytes
    is_ahead: bool = False
    """Whether it was compiled without such a device, and never ran."""


@dataclass(frozen=True, slots=True)
class Unusable:
    """An existing entry that cannot be used."""

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
        """Return why the key is invalid; empty if it is valid."""
        is_ours = self.format == FORMAT and _SHA256.fullmatch(self.sha256)
        return "" if is_ours else f"it is of format {self.format}, expected {FORMAT}"


def entry_of(key: Key, executable: bytes) -> Entry | Unusable:
    """Return a program's entry, if its key matches this one."""
    if hashlib.sha256(executable).hexdigest() != key.sha256:
        return Unusable("its program differs from the one written")
    return Entry(key.program, key.environment, executable, key.ahead)


def count_lookup(counts: ProgramCounts, found: Entry | Unusable | None, seconds: float) -> None:
    """Count a lookup by its result and duration."""
    if found is None:
        counts.add(misses=1, seconds=seconds)
    elif isinstance(found, Entry):
        counts.add(hits=1, seconds=seconds, read_bytes=len(found.executable))
    else:
        counts.add(unusable=1, seconds=seconds)


class CompilationCache:
    """The cache of compiled programs, by target and name, limited in bytes. Thread-safe."""

    def __init__(self, directory: Path, max_bytes: int, max_age_seconds: float = math.inf) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.max_age_seconds = max_age_seconds
        """Lifetime of unused programs, in seconds."""
        self.counts = ProgramCounts()
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._bytes = 0
        """Bytes of the files: as counted last, and what this process has written since."""
        self._is_prepared = False
        """Whether the cache is usable; until then it neither stores nor finds programs."""
        self._is_written = False
        """Whether something was written since the bytes were counted last."""
        self._is_refusing = False
        """Whether a write has failed, and was logged."""

    def prepare(self, target: str) -> Path:
        """Create the directory for a target's programs, evict down to the limit, and return it.

        What was not used for the longest time is removed until it is. Raises InvalidSettings where
        the directory cannot be made, or others can use it.
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
            # Each load asks. Another process that writes keeps within bounds itself.
            if not self._is_prepared or self._is_written:
                self._prune(self.max_bytes)
            self._is_prepared, self._is_written = True, False
        return path

    @property
    def is_empty(self) -> bool:
        """Tell whether it has no entries; an unprepared cache has none. Blocks."""
        return not self._is_prepared or next(_files(self.directory), None) is None

    def prepare_autotuning(self) -> None:
        """Create the directory for XLA's autotuning results; raises InvalidSettings."""
        self.prepare(AUTOTUNE)

    def read(self, target: str, *names: str) -> Entry | Unusable | None:
        """Return the first entry found under these names, or why it is unusable.

        None where none has. Blocks.
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
        """Yield every entry that can be used, with its target. Blocks."""
        for path in sorted(self.directory.glob(f"*/{_key_name('*')}")):
            found = self.read(path.parent.name, path.stem)
            if isinstance(found, Entry):
                yield path.parent.name, found

    def write(self, target: str, name: str, entry: Entry) -> None:
        """Keep an entry, in place of one of this name; best effort. Blocks.

        Of failures in a row the first is logged. Least recently used entries are evicted where
        bytes run short.
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
            # Another server may use the same directory, and have removed it; or nobody may.
            with suppress(OSError):
                file.path.unlink(missing_ok=True)
            self._bytes -= file.size


def name_of(described: Mapping[str, str]) -> str:
    """Return the name of a program's entry."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(described.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_CHARACTERS]


def processor() -> str:
    """Identify the processor: programs for another one may not run."""
    return _described(_CPU_INFO)


@cache
def _described(info: Path) -> str:
    # A home directory is shared by machines, and XLA uses every instruction that it finds.
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
    """Open a directory of this user alone for the length of a block; raises OSError."""
    # What is checked is what is used, whatever the name leads to a moment later.
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
        # Not every file system notes when a file was read.
        if is_used:
            with suppress(OSError):
                os.utime(file.fileno())
        return file.read(limit)


def _replace(directory: int, name: str, data: bytes) -> None:
    """Write a file whole, or not at all."""
    temporary = f".{name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with os.fdopen(os.open(temporary, _AS_NEW, 0o600, dir_fd=directory), "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
