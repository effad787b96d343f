"""The event log: bounded in bytes, numbered without gaps, searchable by any of its fields."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from xlaserve.errors import LoadFailed
from xlaserve.serving.access.principal import Principal
from xlaserve.serving.call import Call, Operation, Peer, current_call
from xlaserve.serving.observability.event_notes import EventNotes, because
from xlaserve.serving.observability.events import (
    MAX_NAME,
    MAX_TEXT,
    Asker,
    Cause,
    Event,
    EventKind,
    EventLog,
    chosen,
    cut,
)


def event(model: str = "m", **facts: Any) -> Event:
    return Event(EventKind.LOAD, 1, model=model, **facts)


def test_the_log_keeps_the_newest_events_within_its_bytes() -> None:
    one = len(msgspec.json.encode(event(number=1)))
    log = EventLog(3 * one, now=lambda: 7)
    for _ in range(5):
        log.note(event())
    kept = log.kept()

    assert [3, 4, 5] == [each.number for each in kept.events]
    assert 2 == kept.dropped
    assert 3 * one == log.size_bytes
    assert 7 == kept.began_ns


def test_an_event_that_is_larger_than_the_log_is_dropped() -> None:
    log = EventLog(100)
    log.note(event(text="x" * 200))
    log.note(event())

    assert [2] == [each.number for each in log.kept().events]


def test_a_log_of_no_bytes_keeps_nothing() -> None:
    log = EventLog(0)
    log.note(event())

    assert () == log.kept().events
    assert 0 == log.size_bytes


@pytest.mark.parametrize(
    "needle", ["RESNET", "alice", "10.0.0.7", "sagemaker", "too large", "other-model", "load"]
)
def test_a_search_looks_at_every_part(needle: str) -> None:
    asker = Asker("alice", "10.0.0.7:1", "SageMaker")
    one = event("resnet", text="Too large", for_model="other-model", asker=asker)

    assert [one] == chosen([one, Event(EventKind.UNLOAD, 1)], search=needle)[:1]


def test_failures_and_one_model_alone() -> None:
    events = [event("a"), event("a", failed=True), event("b", failed=True), event("ab")]

    assert events[1:3] == chosen(events, failed=True)
    assert events[:2] == chosen(events, model="a")


@pytest.mark.parametrize("text", ["x" * 5000, "\ud800" * 9, "\N{GRINNING FACE}" * 2000])
def test_what_clients_name_is_cut_and_always_text(text: str) -> None:
    kept = cut(text, 256)

    assert 257 >= len(kept)
    assert msgspec.json.decode(msgspec.json.encode(kept)) == kept


def noted(log: EventLog) -> list[Event]:
    return list(log.kept().events)


@pytest.mark.parametrize(
    ("operation", "protocol", "expected"),
    [(Operation.MANAGE, "REST", "REST"), (Operation.RUNTIME, "gRPC", "ModelMesh")],
)
def test_an_event_says_who_asked(operation: Operation, protocol: str, expected: str) -> None:
    log = EventLog(10_000)
    call = Call()
    call.operation, call.protocol = operation, protocol
    call.peer, call.principal = Peer(address="10.0.0.7:1"), Principal("alice")
    token = current_call.set(call)
    EventNotes(log).loaded("m", "1", again=False)
    current_call.reset(token)
    EventNotes(log).loaded("m", "1", again=True)

    first, second = noted(log)
    assert Asker("alice", "10.0.0.7:1", expected) == first.asker
    assert Asker() == second.asker
    assert [EventKind.LOAD, EventKind.RELOAD] == [first.kind, second.kind]


def test_an_error_is_noted_once_with_its_version() -> None:
    log = EventLog(10_000)
    notes, error = EventNotes(log), LoadFailed("m", "why")
    notes.load_failed("m", "3", error, "why", again=False)
    notes.load_failed("m", "", error, "why", again=False)
    notes.load_failed("m" * 999, "", ValueError(), "y" * 9999, again=False)

    first, second = noted(log)
    assert ("3", "why", True) == (first.version, first.text, first.failed)
    assert (MAX_NAME + 1, MAX_TEXT + 1) == (len(second.model), len(second.text))


@pytest.mark.parametrize(
    ("worker", "cause", "expected"),
    [
        (None, Cause.START, True),
        (0, Cause.START, True),
        (1, Cause.START, False),
        (0, Cause.OTHER_WORKER, False),
        (1, Cause.REPOSITORY, True),
        (1, Cause.NONE, True),
    ],
)
async def test_one_of_several_processes_notes_what_all_of_them_do(
    worker: int | None, cause: Cause, expected: bool
) -> None:
    """A task that starts with a cause keeps it; failures are recorded by every process."""
    log = EventLog(10_000)
    notes = EventNotes(log, worker)

    async def load() -> None:
        notes.loaded("m", "1", again=False)
        notes.load_failed("m", "1", ValueError(), "why", again=False)

    with because(cause):
        task = asyncio.ensure_future(load())
    await task

    found = noted(log)
    assert [False, True][not expected :] == [each.failed for each in found]
    assert {cause} == {each.cause for each in found}
    assert {worker} == {each.worker for each in found}


def test_files_are_read_again_by_all_and_noted_by_one() -> None:
    log = EventLog(10_000)
    for worker in (0, 1):
        EventNotes(log, worker).read_again("tls", "SIGHUP")
        EventNotes(log, worker).read_again("tls", "SIGHUP", "no such file")

    found = [(each.worker, each.failed, each.text) for each in noted(log)]
    assert [(0, False, "SIGHUP"), (0, True, "no such file"), (1, True, "no such file")] == found


def test_where_nothing_is_kept_nothing_fails() -> None:
    """Components built without a log discard their events."""
    notes: Any = SimpleNamespace(value=EventNotes())
    notes.value.unloaded("m", "1", for_model="other")
