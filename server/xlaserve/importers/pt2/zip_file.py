"""Reads zip files strictly: ambiguous entries and false sizes are errors."""

import mmap
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from xlaserve.errors import InvalidModel

MAX_ENTRIES = 65_535
MAX_DIRECTORY_BYTES = 32 << 20

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 0xFFFF
_MAX32 = 0xFFFFFFFF
_SATURATED = (0xFFFF, 0xFFFF, _MAX32, _MAX32)
"""Field values that refer to the 64-bit record of the directory."""
_ZIP64_FIELD = 1

_STORED, _DEFLATED = 0, 8
_REFUSED_FLAGS = {1: "is encrypted", 1 << 5: "is a patch", 1 << 6: "is encrypted"}
_MAX_RATIO = 1032
"""Highest compression ratio of deflate (zlib's documentation); a higher one is an error."""
_MAX_NAME_BYTES = 4096
_SHOWN = 100
_CRC_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of an archive."""

    name: str
    size: int
    """Uncompressed size in bytes."""
    compressed_size: int
    crc: int
    is_deflated: bool
    start: int
    """Offset of the local header."""


class ZipFile:
    """The entries of a zip file in memory or mapped, read without copies."""

    def __init__(self, data: "mmap.mmap | bytes") -> None:
        """Read the central directory; raises InvalidModel if anything is ambiguous."""
        self._data = data
        self._directory_start, count, size = _end(data)
        entries = _entries(data[self._directory_start : self._directory_start + size], count)
        self.entries: Mapping[str, Entry] = MappingProxyType(
            {entry.name: entry for entry in entries}
        )
        """Files by path; directories are omitted."""
        self._starts = self._checked_starts(entries)

    def read(self, name: str, limit_bytes: int) -> memoryview:
        """Return the bytes of an entry; uncompressed entries are views of the file.

        Raises InvalidModel if the entry is larger than the limit, damaged or truncated.
        """
        entry = self.entries[name]
        if entry.size > limit_bytes:
            raise InvalidModel(
                f"entry '{name}' has {entry.size} bytes, more than the {limit_bytes} allowed"
            )
        start, end = self._starts[name], self._starts[name] + entry.compressed_size
        data = memoryview(self._data)[start:end]
        if entry.is_deflated:
            data = _inflated(entry, data)
        crc = 0
        for place in range(0, len(data), _CRC_BYTES):
            crc = zlib.crc32(data[place : place + _CRC_BYTES], crc)
        if crc != entry.crc:
            raise InvalidModel(f"entry '{name}' is damaged: its CRC-32 does not match")
        return data

    def _checked_starts(self, entries: list[Entry]) -> dict[str, int]:
        """Return the offset of each entry's data.

        Raises InvalidModel if entries overlap, or if an entry's own header contradicts the central
        directory.
        """
        starts: dict[str, int] = {}
        free = 0
        for entry in sorted(entries, key=lambda entry: entry.start):
            shown = f"entry '{entry.name[:_SHOWN]}'"
            if entry.start < free:
                raise InvalidModel(f"{shown} overlaps another one")
            start = self._data_start(entry)
            free = start + entry.compressed_size
            if free > self._directory_start:
                raise InvalidModel(
                    f"{shown} ends at byte {free}, after the central directory began"
                )
            starts[entry.name] = start
        return starts

    def _data_start(self, entry: Entry) -> int:
        header = self._data[entry.start : entry.start + _LOCAL.size]
        if len(header) < _LOCAL.size or header[:4] != b"PK\x03\x04":
            raise InvalidModel(f"entry '{entry.name[:_SHOWN]}' has no header at its offset")
        fields: tuple[int, ...] = _LOCAL.unpack(header)[1:]
        method, name_length, extra_length = fields[2], fields[8], fields[9]
        name_start = entry.start + _LOCAL.size
        name = self._data[name_start : name_start + name_length]
        expected = _DEFLATED if entry.is_deflated else _STORED
        if name != entry.name.encode() or method != expected:
            raise InvalidModel(
                f"entry '{entry.name[:_SHOWN]}' has a different name or method in its local header"
            )
        return name_start + name_length + extra_length


def _inflated(entry: Entry, data: memoryview) -> memoryview:
    """Inflate an entry, up to the size in the directory."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        # Request one extra byte to detect an entry that is larger than declared.
        found = inflater.decompress(data, entry.size + 1)
    except zlib.error as error:
        raise InvalidModel(f"entry '{entry.name}' cannot be inflated: {error}") from None
    if len(found) != entry.size or not inflater.eof:
        raise InvalidModel(f"entry '{entry.name}' does not have its recorded {entry.size} bytes")
    return memoryview(found)


# --- Directory ---------------------------------------------------------------------------------


def _end(data: "mmap.mmap | bytes") -> tuple[int, int, int]:
    """Return the offset, the number of entries and the size in bytes of the central directory."""
    length = len(data)
    end = data.rfind(b"PK\x05\x06", max(0, length - _END.size - _MAX_COMMENT))
    if end < 0 or end + _END.size > length:
        raise InvalidModel("not a .pt2 file, which is a zip archive: it has no central directory")
    _, disk, first_disk, here, count, size, start, comment = _END.unpack(
        data[end : end + _END.size]
    )
    if end + _END.size + comment != length:
        raise InvalidModel("the zip file has bytes after its end record")
    directory_end = end
    narrow = (here, count, size, start)
    if data[end - _END64_LOCATOR.size : end].startswith(b"PK\x06\x07"):
        directory_end, disk, first_disk, *wide = _end64(data, end)
        here, count, size, start = wide
        if any(n not in (w, m) for n, w, m in zip(narrow, wide, _SATURATED, strict=True)):
            raise InvalidModel("the two end records of the zip file differ")
    if disk or first_disk or here != count:
        raise InvalidModel("the zip file is one of several parts")
    if count > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES:
        raise InvalidModel(
            f"the zip file has {count} entries and a central directory of {size} bytes, more than"
            f" the {MAX_ENTRIES} entries and {MAX_DIRECTORY_BYTES} bytes allowed"
        )
    if start + size != directory_end:
        raise InvalidModel("the zip file's central directory is not at the recorded offset")
    return start, count, size


def _end64(data: "mmap.mmap | bytes", end: int) -> tuple[int, int, int, int, int, int, int]:
    place = end - _END64_LOCATOR.size
    _, _, start64, disks = _END64_LOCATOR.unpack(data[place:end])
    record = data[start64 : start64 + _END64.size] if start64 < place else b""
    if len(record) < _END64.size or record[:4] != b"PK\x06\x06" or disks != 1:
        raise InvalidModel("the zip file lacks its 64-bit end record")
    _, length, _, _, disk, first_disk, here, count, size, start = _END64.unpack(record)
    if start64 + 12 + length != place:
        raise InvalidModel("the zip file has bytes between its central directory and end record")
    return start64, disk, first_disk, here, count, size, start


def _entries(directory: bytes, count: int) -> list[Entry]:
    found: dict[str, Entry] = {}
    walked = 0
    for entry in _walk(directory):
        walked += 1
        if entry.name.endswith("/") and not entry.size:
            continue
        _check_name(entry.name)
        if entry.name in found:
            raise InvalidModel(f"the zip file has two entries '{entry.name[:_SHOWN]}'")
        found[entry.name] = entry
    if walked != count:
        raise InvalidModel(f"the zip file has {walked} entries, but its end record says {count}")
    return list(found.values())


def _walk(directory: bytes) -> Iterator[Entry]:
    place = 0
    while place < len(directory):
        header = directory[place : place + _CENTRAL.size]
        if len(header) < _CENTRAL.size or header[:4] != b"PK\x01\x02":
            raise InvalidModel("the zip file's central directory is damaged")
        fields = _CENTRAL.unpack(header)
        flags, method = fields[3], fields[4]
        crc, compressed, size = fields[7:10]
        name_length, extra_length, comment_length = fields[10:13]
        start = fields[16]
        place += _CENTRAL.size
        raw = directory[place : place + name_length]
        extra = directory[place + name_length : place + name_length + extra_length]
        place += name_length + extra_length + comment_length
        name = _text(raw, name_length)
        for flag, text in _REFUSED_FLAGS.items():
            if flags & flag:
                raise InvalidModel(f"entry '{name[:_SHOWN]}' {text}")
        if method not in (_STORED, _DEFLATED):
            raise InvalidModel(
                f"entry '{name[:_SHOWN]}' is compressed by method {method}, expected none or "
                "deflate"
            )
        size, compressed, start = _wide(name, extra, (size, compressed, start))
        _check_sizes(name, method, size, compressed)
        yield Entry(name, size, compressed, crc, method == _DEFLATED, start)


def _check_sizes(name: str, method: int, size: int, compressed: int) -> None:
    is_lie = size != compressed if method == _STORED else size > compressed * _MAX_RATIO
    if is_lie:
        raise InvalidModel(
            f"entry '{name[:_SHOWN]}' has {compressed} bytes that cannot be {size} uncompressed"
        )


def _wide(name: str, extra: bytes, narrow: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return sizes and offset; saturated ones are read from the ZIP64 extra field."""
    lacking = narrow.count(_MAX32)
    if not lacking:
        return narrow
    place = 0
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        place += 4
        if kind == _ZIP64_FIELD and length >= 8 * lacking and place + length <= len(extra):
            wide = list(struct.unpack_from(f"<{lacking}Q", extra, place))
            size, compressed, start = (wide.pop(0) if n == _MAX32 else n for n in narrow)
            return size, compressed, start
        place += length
    raise InvalidModel(f"entry '{name[:_SHOWN]}' lacks its 64-bit size")


def _text(raw: bytes, length: int) -> str:
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        name = ""
    if len(raw) != length or not name or length > _MAX_NAME_BYTES:
        raise InvalidModel(
            "the zip file's central directory has a name that is truncated or not UTF-8"
        )
    return name


def _check_name(name: str) -> None:
    parts = name.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\\" in name or "\0" in name:
        raise InvalidModel(f"the zip file has an entry outside its root: '{name[:_SHOWN]}'")
