"""Formatting of the access log's lines.

Lines of executed inferences differ mainly in their numbers: the other members are formatted once
per connection and model version, not once per line.
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
"""Maximum length of a line, since clients choose ids and error texts."""
MAX_NAME = 128
"""Ids and names are truncated to this many characters."""

_MAX_ERROR = 512
_MAX_KNOWN = 1024
"""Maximum number of connection and version pairs whose constant members are cached."""
_MILLISECOND_NS = 1_000_000

StatusOf: TypeAlias = Callable[[BaseException | None, str, int], str]
"""Returns the status shown to the client, from the error, the listener, and an HTTP status."""


# gc=False: entries cannot be part of a reference cycle, and thousands are queued.
class ExecutedEntry(msgspec.Struct, gc=False):
    """An executed inference to be logged: the common case."""

    record: CallRecord
    found: ServedVersion
    peer: Peer
    principal: Principal | None
    id: str
    submitted_ns: int
    """This and the following times are by the engine's clock."""
    begun_ns: int
    ended_ns: int
    rows: int
    error: None = None


class Entry(msgspec.Struct, gc=False):
    """Any other ended call to be logged."""

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
    """A line of the access log."""

    time: str
    operation: str
    status: str
    peer: str
    listener: str
    total_us: int
    bytes_in: int
    bytes_out: int | None = None
    """Bytes of the answers; None if no answer was written."""
    id: str = ""
    model: str = ""
    version: str = ""
    principal: str | None = None
    queue_us: int | None = None
    execute_us: int | None = None
    batch: int | None = None
    """Rows of the call's execution, including those of other calls."""
    error: str | None = None


# Constant members are pre-encoded (Raw), so that only numbers are formatted per line.
class _ExecutedLine(msgspec.Struct, gc=False):
    """The line of an executed inference."""

    time: str
    operation: msgspec.Raw
    """Also contains `status`, `peer` and `listener`."""
    total_us: int
    bytes_in: int
    bytes_out: int
    id: str | msgspec.UnsetType
    model: msgspec.Raw
    """Also contains `version` and `principal`."""
    queue_us: int
    execute_us: int
    batch: int


class _Constants(msgspec.Struct, gc=False):
    """Encoded members shared by the lines of one connection, version and principal."""

    peer: Peer
    found: ServedVersion | None
    principal: Principal | None
    head: msgspec.Raw
    names: msgspec.Raw


_encoder = msgspec.json.Encoder()
_MICROSECONDS = tuple(f"{number:03d}Z" for number in range(1000))
_NO_CONSTANTS = _Constants(Peer(), None, None, msgspec.Raw(), msgspec.Raw())


class Lines:
    """Formats entries as lines in ASCII, without control characters, of bounded length.

    Belongs to the event loop.
    """

    def __init__(
        self, status_of: StatusOf, clock: Callable[[], int], now: Callable[[], int]
    ) -> None:
        """`clock` is the engine's clock; `now` returns nanoseconds since the epoch."""
        self._status_of = status_of
        self._clock = clock
        self._now = now
        self._known: dict[tuple[int, int], _Constants] = {}
        """Keyed by the ids of connection and version, which the value keeps alive."""

    def of(self, entries: Sequence[Entry | ExecutedEntry]) -> bytes:
        """Return one line per entry, in order."""
        # Computed for each batch, because the wall clock may be adjusted.
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
        """Return a line that reports dropped records."""
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
    """Encode members for insertion as the value of the first name, which is left out itself."""
    text = json.dumps(dict(zip(names, values, strict=False)), separators=(",", ":"))
    return msgspec.Raw(text.partition(":")[2][:-1].encode())


def shortened(text: str, most: int = MAX_NAME) -> str:
    """Truncate a text."""
    return text if len(text) <= most else f"{text[:most]}..."


def text_of(error: BaseException) -> str:
    """Return class and text of an error, truncated."""
    kind = type(error).__name__
    text = str(error)[:_MAX_ERROR]
    return f"{kind}: {text}" if text else kind


def written(entry: Entry, offset: int) -> bytes:
    """Return the line of an entry; `offset` converts the engine's clock to time since the epoch."""
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
        data = b"\xff"  # a lone surrogate, from a byte that was not UTF-8
    if data.isascii() and b"\x7f" not in data and len(data) <= MAX_RECORD_BYTES:
        return data
    return _escaped(msgspec.structs.asdict(line))


def _escaped(line: Mapping[str, object]) -> bytes:
    """Encode a line in ASCII, so that client data cannot inject control characters."""
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
