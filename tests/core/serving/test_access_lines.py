"""Lines of the access log: the fast path writes the same bytes as the general path."""

import itertools
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xlaserve.errors import Unsupported
from xlaserve.net.status import reported_status
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.call import Peer
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.infer_call import ServedVersion
from xlaserve.serving.observability.access_lines import (
    MAX_RECORD_BYTES,
    Entry,
    ExecutedEntry,
    Lines,
    text_of,
    written,
)

NOW = 1_700_000_000_999_999_000
CLOCK = 5_000_000_000
PEERS = Peer("grpc_endpoint", "10.0.0.7:1"), Peer("http_endpoint", "10.0.0.7:2")
HOSTILE = ["r7", 'a"b\\', "a\r\nb", "\x7f", "\x1b[2J", "\u202eabc", "\udcff", "%d%s", "x" * 128]


def version(model: str, number: str = "1") -> ServedVersion:
    return cast(ServedVersion, SimpleNamespace(model=model, number=number))


ONE, TWO = version("one"), version('t"wo%', "2" * 200)


def executed(**given: Any) -> ExecutedEntry:
    record = CallRecord(CLOCK, bytes_in=117, bytes_out=92, written_ns=CLOCK + 184_999)
    values: dict[str, Any] = {
        "record": record,
        "found": ONE,
        "peer": PEERS[0],
        "principal": None,
        "id": "",
        "submitted_ns": CLOCK + 10_000,
        "begun_ns": CLOCK + 21_000,
        "ended_ns": CLOCK + 73_000,
        "rows": 4,
    }
    return ExecutedEntry(**{**values, **given})


def lines() -> Lines:
    return Lines(reported_status, lambda: CLOCK, lambda: NOW)


def read(data: bytes) -> list[dict[str, Any]]:
    assert all(0x20 <= byte < 0x7F for byte in data.replace(b"\n", b""))
    assert all(len(line) <= MAX_RECORD_BYTES for line in data.splitlines())
    return [json.loads(line) for line in data.splitlines()]


def generally(entries: Iterable[ExecutedEntry]) -> list[dict[str, Any]]:
    made = lines()
    data = b"".join(written(made._whole(entry), NOW - CLOCK) + b"\n" for entry in entries)
    return read(data)


def test_a_line_has_its_members_in_their_order() -> None:
    (line,) = read(lines().of([executed(id="r7", principal=Principal("alice"))]))

    assert {
        "time": "2023-11-14T22:13:21.000183Z",
        "operation": "infer",
        "status": "OK",
        "peer": "10.0.0.7:1",
        "listener": "grpc_endpoint",
        "total_us": 184,
        "bytes_in": 117,
        "bytes_out": 92,
        "id": "r7",
        "model": "one",
        "version": "1",
        "principal": "alice",
        "queue_us": 11,
        "execute_us": 52,
        "batch": 4,
    } == line
    (general,) = generally([executed(id="r7", principal=Principal("alice"))])
    assert list(general) == list(line)


def test_many_lines_are_those_of_the_general_way() -> None:
    """Alternating connections, models, principals, ids and seconds are not confused."""
    callers = None, Principal('al"ice%'), Principal("b\u00f6b")
    moments = (0, 999, 1000, 1_000_000, 999_999_999, 3_600_000_000_000)
    entries = [
        executed(
            peer=peer,
            found=found,
            principal=caller,
            id=name,
            record=CallRecord(
                CLOCK, bytes_in=number, bytes_out=2 * number, written_ns=CLOCK + 80_000 + moment
            ),
        )
        for number, (name, moment, caller, found, peer) in enumerate(
            itertools.product(["", *HOSTILE], moments, callers, (ONE, TWO), PEERS)
        )
    ]

    by_peer = sorted(entries, key=lambda entry: entry.peer.address)
    by_both = sorted(by_peer, key=lambda entry: (entry.peer.address, entry.found.model))

    for order in (entries, by_peer, by_both):
        assert generally(order) == read(lines().of(order))


@pytest.mark.parametrize(
    "record",
    [
        CallRecord(CLOCK, bytes_in=3),
        CallRecord(CLOCK, bytes_out=9, written_ns=CLOCK + 20_000),
        CallRecord(CLOCK, bytes_out=9, written_ns=CLOCK + 90_000, status=503),
    ],
    ids=["nothing was written", "written before it ended", "another status"],
)
def test_what_is_not_plain_is_written_the_general_way(record: CallRecord) -> None:
    entries = [executed(), executed(record=record, peer=PEERS[1]), executed()]

    found = read(lines().of(entries))

    assert generally(entries) == found
    assert ("bytes_out" in found[1]) == (record.bytes_out >= 0)
    assert str(record.status or 200) == found[1]["status"]


def test_lines_stay_in_the_order_of_the_entries() -> None:
    error = Unsupported("that")
    failed = Entry(
        CallRecord(CLOCK), CLOCK + 1, "infer", "", "m", "", None, PEERS[0], "X", text_of(error)
    )

    found = read(lines().of([executed(id="a"), failed, executed(id="b")]))

    assert ["a", None, "b"] == [line.get("id") for line in found]
    assert text_of(error) == found[1]["error"]


def test_what_is_known_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xlaserve.serving.observability.access_lines._MAX_KNOWN", 3)
    made = lines()
    entries = [executed(peer=Peer("grpc_endpoint", f"10.0.0.7:{port}")) for port in range(20)]

    found = read(made.of(entries))

    assert [f"10.0.0.7:{port}" for port in range(20)] == [line["peer"] for line in found]
    assert len(made._known) <= 3
