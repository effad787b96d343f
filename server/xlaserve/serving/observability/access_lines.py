"""Lines of the access log: the fields of a finished call, and their encoding.

An inference that was executed has a line like that of the inference before it, but for its
numbers: all else is formatted once for its connection and its version, and not once a line.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import TypeAlias

import msgspec

from xlaserve.serving.access.principal import Principal
from xlaserve.serving.call import Operation, Peer
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.infer_call import ServedVersion

MAX_RECORD_BYTES = 8192
"""Limit of a line: ids and texts of errors come from clients."""
MAX_NAME = 128
"""Kept characters of an id and of a name."""

_MAX_ERROR = 512
_MAX_KNOWN = 1024
"""Pairs of connections and versions whose constant members are kept."""
_MILLISECOND_NS = 1_000_000

StatusOf: TypeAlias = Callable[[BaseException | None, str, int], str]
"""Returns the client's status from the error, its listener, and an HTTP status."""


# Entries refer to nothing that refers to them, and thousands wait: the collector need not look.
class ExecutedEntry(msgspec.Struct, gc=False):
    """An executed inference to be written; made for most calls."""

    record: CallRecord
    found: ServedVersion
    peer: Peer
    principal: Principal | None
    id: str
    submitted_ns: int
    """These are read from the clock of the engine."""
    begun_ns: int
    ended_ns: int
    rows: int
    error: None = None


class Entry(msgspec.Struct, gc=False):
    """Any other ended call to be written."""

    record: CallRecord
    ended_ns: int
    operation: str
    id: str
    model: str
    version: str
    principal: str | None
    peer: Peer
    status: str
    error: str | None
    queue_ns: int | None = None
    execute_ns: int | None = None
    batch: int | None = None


class Line(msgspec.Struct, omit_defaults=True):
    """A line of the log."""

    time: str
    operation: str
    status: str
    peer: str
    listener: str
    total_us: int
    bytes_in: int
    bytes_out: int | None = None
    """None where no answer was written."""
    id: str = ""
    model: str = ""
    version: str = ""
    principal: str | None = None
    queue_us: int | None = None
    execute_us: int | None = None
    batch: int | None = None
    """Rows of its execution, with those of other calls."""
    error: str | None = None


# Constant members are one raw value: of a line, only numbers are formatted.
class _ExecutedLine(msgspec.Struct, gc=False):
    """The line of an executed inference."""

    time: str
    operation: msgspec.Raw
    """Followed by `status`, `peer` and `listener`."""
    total_us: int
    bytes_in: int
    bytes_out: int
    id: str | msgspec.UnsetType
    model: msgspec.Raw
    """Followed by `version` and `principal`."""
    queue_us: int
    execute_us: int
    batch: int


class _Constants(msgspec.Struct, gc=False):
    """The members that lines of one connection, version and principal have in common."""

    peer: Peer
    found: ServedVersion | None
    principal: Principal | None
    head: msgspec.Raw
    names: msgspec.Raw


_encoder = msgspec.json.Encoder()
_MICROSECONDS = tuple(f"{number:03d}Z" for number in range(1000))
_NO_CONSTANTS = _Constants(Peer(), None, None, msgspec.Raw(), msgspec.Raw())


class Lines:
    """Writes entries as lines: ASCII, without control characters, of a bounded length.

    Of the event loop, as those who make the entries.
    """

    def __init__(
        self, status_of: StatusOf, clock: Callable[[], int], now: Callable[[], int]
    ) -> None:
        """`clock` is the engine's, `now` the time since the epoch."""
        self._status_of = status_of
        self._clock = clock
        self._now = now
        self._known: dict[tuple[int, int], _Constants] = {}
        """The key is the identity of connection and version, which the value keeps alive."""

    def of(self, entries: Sequence[Entry | ExecutedEntry]) -> bytes:
        """Return a line of each entry, in their order."""
        # Looked at anew for each batch: the clock of the wall is set now and then.
        offset = self._now() - self._clock()
        lines: list[_ExecutedLine | msgspec.Raw] = []
        millisecond, text, constants = 0, "", _NO_CONSTANTS
        for entry in entries:
            record = entry.record
            if type(entry) is not ExecutedEntry or record.bytes_out < 0 or record.status:
                lines.append(msgspec.Raw(self._written(entry, offset)))
                continue
            submitted, begun, executed = entry.submitted_ns, entry.begun_ns, entry.ended_ns
            ended = record.written_ns
            if ended < executed:  # noqa: PLR1730 (a call of max costs as much as a field)
                ended = executed
            microsecond = (ended - millisecond) // 1000
            if not 0 <= microsecond < 1000:
                number = (ended + offset) // _MILLISECOND_NS
                text, millisecond = _to_millisecond(number), number * _MILLISECOND_NS - offset
                microsecond = (ended - millisecond) // 1000
            if (
                entry.peer is not constants.peer
                or entry.found is not constants.found
                or entry.principal is not constants.principal
            ):
                constants = self._constants(entry.peer, entry.found, entry.principal)
            shown_id: str | msgspec.UnsetType = msgspec.UNSET
            if entry.id:
                if not (entry.id.isascii() and entry.id.isprintable()):
                    lines.append(msgspec.Raw(self._written(entry, offset)))
                    continue
                shown_id = entry.id
            lines.append(
                _ExecutedLine(
                    text + _MICROSECONDS[microsecond],
                    constants.head,
                    (ended - record.begun_ns) // 1000,
                    record.bytes_in,
                    record.bytes_out,
                    shown_id,
                    constants.names,
                    (begun - submitted) // 1000,
                    (executed - begun) // 1000,
                    entry.rows,
                )
            )
        return _encoder.encode_lines(lines)

    def of_dropped(self, count: int) -> bytes:
        """Return the line in place of dropped records."""
        return json.dumps({"time": _iso(self._now()), "dropped": count}).encode() + b"\n"

    def _constants(
        self, peer: Peer, found: ServedVersion, principal: Principal | None
    ) -> _Constants:
        key = id(peer), id(found)
        known = self._known.get(key)
        if known is None or known.principal is not principal:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            status = self._status_of(None, peer.listener, 0)
            values = (Operation.INFER.value, status, peer.address, peer.listener)
            names = [shortened(found.model), shortened(found.number)]
            if principal is not None:
                names.append(principal.name[:MAX_NAME])
            head = _members(("operation", "status", "peer", "listener"), values)
            shown = _members(("model", "version", "principal"), names)
            known = self._known[key] = _Constants(peer, found, principal, head, shown)
        return known

    def _written(self, entry: Entry | ExecutedEntry, offset: int) -> bytes:
        return written(entry if isinstance(entry, Entry) else self._whole(entry), offset)

    def _whole(self, entry: ExecutedEntry) -> Entry:
        peer, found, principal = entry.peer, entry.found, entry.principal
        return Entry(
            entry.record,
            entry.ended_ns,
            Operation.INFER.value,
            entry.id,
            shortened(found.model),
            shortened(found.number),
            None if principal is None else principal.name[:MAX_NAME],
            peer,
            self._status_of(None, peer.listener, entry.record.status),
            None,
            entry.begun_ns - entry.submitted_ns,
            entry.ended_ns - entry.begun_ns,
            entry.rows,
        )


def _members(names: Sequence[str], values: Sequence[str]) -> msgspec.Raw:
    """Return members of an object, without the first name: they are written as its value."""
    text = json.dumps(dict(zip(names, values, strict=False)), separators=(",", ":"))
    return msgspec.Raw(text.partition(":")[2][:-1].encode())


def shortened(text: str, most: int = MAX_NAME) -> str:
    """Return a text cut to a number of characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def text_of(error: BaseException) -> str:
    """Return the class and the text of an error, of a bounded length."""
    kind = type(error).__name__
    text = str(error)[:_MAX_ERROR]
    return f"{kind}: {text}" if text else kind


def written(entry: Entry, offset: int) -> bytes:
    """Return the line of an entry; `offset` is the time since the epoch where the clock is 0."""
    record, peer = entry.record, entry.peer
    ended = max(entry.ended_ns, record.written_ns)
    line = Line(
        _iso(ended + offset),
        entry.operation,
        entry.status,
        peer.address,
        peer.listener,
        (ended - record.begun_ns) // 1000,
        record.bytes_in,
        record.bytes_out if record.bytes_out >= 0 else None,
        entry.id,
        entry.model,
        entry.version,
        entry.principal,
        None if entry.queue_ns is None else entry.queue_ns // 1000,
        None if entry.execute_ns is None else entry.execute_ns // 1000,
        entry.batch,
        entry.error,
    )
    try:
        data = _encoder.encode(line)
    except UnicodeEncodeError:
        data = b"\xff"  # a surrogate, which stands for a byte that is not UTF-8
    if data.isascii() and b"\x7f" not in data and len(data) <= MAX_RECORD_BYTES:
        return data
    return _escaped(msgspec.structs.asdict(line))


def _escaped(line: Mapping[str, object]) -> bytes:
    """Write a line in ASCII: no character of a client then moves a cursor or ends a record."""
    most = _MAX_ERROR
    shown = {name: value for name, value in line.items() if value not in (None, "")}
    while len(data := json.dumps(shown).encode()) > MAX_RECORD_BYTES:
        most //= 2
        shown = {
            name: shortened(value, most) if isinstance(value, str) else value
            for name, value in shown.items()
        }
    return data


@lru_cache(maxsize=8)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _to_millisecond(number: int) -> str:
    seconds, rest = divmod(number, 1000)
    return f"{_second(seconds)}.{rest:03d}"


def _iso(ns: int) -> str:
    milliseconds, rest = divmod(ns // 1000, 1000)
    return f"{_to_millisecond(milliseconds)}{rest:03d}Z"
