"""Every call passes every gate in order, and observers see it begin and end."""

import asyncio
from typing import Any

import pytest
from support.calls import CountedHeaders, NotedCall, NotingObserver

from xlaserve.errors import DeadlineExceeded, Overloaded, ShuttingDown, Unsupported
from xlaserve.serving.call import NOBODY, Admission, Call, Operation, current_call
from xlaserve.serving.call_record import CallRecord
from xlaserve.serving.gates import REFUSED_WHILE_DRAINING, Gates


def by_token(call: Call) -> None:
    """Refuse callers without a token."""
    if call.headers.get("authorization") != "Bearer right":
        raise Unsupported("a call without a token")


def test_the_table_has_an_order() -> None:
    gates = Gates()

    assert ["draining", "permission", "limits", "deadline"] == [g.name for g in gates.table]
    assert ["limits"] == [gate.name for gate in gates.table if gate.of_model]


def test_a_permission_is_asked_for_every_call() -> None:
    """Neither refusals nor grants are cached, however alike the calls are."""
    gates = Gates(permission=by_token)
    right = CountedHeaders({"authorization": "Bearer right"})
    wrong = CountedHeaders({"authorization": "Bearer wrong"})
    for _ in range(5):
        gates.admit(NotedCall(headers=right))
        with pytest.raises(Unsupported):
            gates.admit(NotedCall(headers=wrong))

    assert (5, 5) == (right.looks, wrong.looks)


@pytest.mark.parametrize("operation", Operation)
async def test_a_draining_server_infers_no_more(operation: Operation) -> None:
    gates = Gates()
    gates.admit(NotedCall(operation=operation))
    gates.drain()
    refused = False
    try:
        gates.admit(NotedCall(operation=operation))
    except ShuttingDown:
        refused = True

    assert (operation in REFUSED_WHILE_DRAINING) is refused
    assert (operation is Operation.INFER) is refused


def test_what_a_call_needs_to_end_is_admitted_while_the_server_drains() -> None:
    gates, call = Gates(), NotedCall()
    gates.admit(call)
    gates.drain()
    gates.admit(step := NotedCall(parent=call))

    assert step.has_begun


async def test_a_call_whose_time_is_over_is_refused() -> None:
    now = asyncio.get_running_loop().time()
    Gates().admit(NotedCall(deadline=now + 1000))

    with pytest.raises(DeadlineExceeded):
        Gates().admit(NotedCall(deadline=now))


async def test_the_gates_refuse_in_order() -> None:
    """A caller without permission gets that error first, unless the server drains."""
    late = asyncio.get_running_loop().time() - 1
    gates = Gates(permission=by_token)
    with pytest.raises(Unsupported):
        gates.admit(NotedCall(deadline=late))
    gates.drain()
    with pytest.raises(ShuttingDown):
        gates.admit(NotedCall(deadline=late))


def test_limits_are_asked_for_once_the_model_is_found() -> None:
    gates, call = Gates(), NotedCall()
    gates.admit(call)
    gates.admit_to_model(call)
    call.admission = Admission("m", 1)
    gates.admit_to_model(call)
    call.admission.in_progress = 1

    with pytest.raises(Overloaded, match="model 'm': 1 requests .*max_requests_per_model"):
        gates.admit_to_model(call)


def test_a_call_begins_once() -> None:
    gates, call = Gates(), NotedCall()
    gates.admit(call)

    with pytest.raises(AssertionError):
        gates.admit(call)


def test_observers_see_the_calls_that_are_refused_too() -> None:
    observer = NotingObserver()
    gates = Gates(permission=by_token, observers=[observer])
    call, error = NotedCall(), None
    try:
        gates.admit(call)
    except Unsupported as refusal:
        error = refusal
        call.fail(refusal)

    assert [call] == observer.began_with
    assert [((call,), error)] == observer.ended_with
    assert [(error, True)] == call.told


# --- handlers that return or raise -------------------------------------------------------------


def end_with(raised: BaseException | None) -> None:
    if raised is not None:
        raise raised


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (None, type(None)),
        (Unsupported("this"), Unsupported),
        (ZeroDivisionError(), ZeroDivisionError),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (GeneratorExit(), GeneratorExit),
    ],
    ids=["returns", "refuses", "breaks", "is cancelled", "is closed"],
)
async def test_a_call_ends_with_its_handler(raised: Any, outcome: type) -> None:
    """The transport writes the answer or the error: here the call only ends."""
    observer = NotingObserver()
    gates, call = Gates(observers=[observer]), NotedCall()
    found: list[object] = []
    try:
        with gates.passing(call):
            found.append(current_call.get())
            end_with(raised)
    except BaseException as error:
        assert error is raised

    assert [call] == found
    assert current_call.get() is None
    assert [outcome] == [type(one) for _, one in observer.ended_with]
    assert [] == call.told
    assert isinstance(raised, asyncio.CancelledError) is call.is_cancelled


def test_a_handler_is_not_called_for_a_call_that_is_refused() -> None:
    observer, handled = NotingObserver(), list[str]()
    gates = Gates(permission=by_token, observers=[observer])
    with pytest.raises(Unsupported), gates.passing(NotedCall()):
        handled.append("it")

    assert [] == handled
    assert [Unsupported] == [type(one) for _, one in observer.ended_with]
    assert current_call.get() is None


def test_a_call_of_the_server_itself_is_nobodys() -> None:
    call = NotedCall()

    assert call.peer is NOBODY
    assert call.headers.get("authorization") is None


async def test_calls_have_records_while_an_observer_needs_them() -> None:
    ticks = iter(range(7, 100))
    gates = Gates(clock=lambda: next(ticks))
    observer = NotingObserver()

    def begun() -> CallRecord | None:
        call = NotedCall()
        gates.admit(call)
        return call.record

    assert begun() is None
    gates.observe(observer, needs_records=True)
    assert gates.are_watched
    first, second = begun(), begun()
    assert first is not None
    assert second is not None
    assert (7, 8) == (first.begun_ns, second.begun_ns)
    gates.observe_no_more(observer)

    assert begun() is None
    assert not gates.are_watched
