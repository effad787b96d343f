"""Heads that are known, and heads that are taken for them."""

import pytest

from xlaserve.core.serving.call import Headers, Peer
from xlaserve.core.serving.inference import Pending
from xlaserve.transport.rest.messages import Answered, HttpResponse
from xlaserve.transport.rest.plans import Plan, Plans

MAX_LENGTH = 1000


def begin(body: memoryview, done: Answered, headers: Headers, peer: Peer) -> HttpResponse | Pending:
    raise NotImplementedError


def head(*lines: str, length: str = "Content-Length: 5") -> bytes:
    return "\r\n".join(["POST /a HTTP/1.1", "Host: b", *lines, length, "", ""]).encode("latin-1")


def plan(length: int = 5) -> Plan:
    return Plan("POST", "/a", length, begin)


@pytest.fixture
def plans() -> Plans:
    """The plans of a server that has read one head."""
    plans = Plans(10, MAX_LENGTH)
    plans.keep(head("A: b", "X-Request-Id: 1"), plan())
    return plans


def test_a_head_is_known_by_its_bytes(plans: Plans) -> None:
    assert plan() == plans.get(head("A: b", "X-Request-Id: 1"))
    assert plans.get(head("A: b", "X-Request-Id: 2")) is None


@pytest.mark.parametrize(
    ("alike", "length"),
    [
        (head("A: b", "X-Request-Id: 2"), 5),
        (head("A: b", "x-request-id:"), 5),
        (head("A: b"), 5),
        (head("traceparent: 00-1", "A: b", "tracestate: a=b, c=d", "X-B3-TraceId: 7"), 5),
        (head("A: b", length="content-length: 0"), 0),
        (head("A: b", length="Content-Length:999"), 999),
    ],
)
def test_a_head_that_differs_in_nothing_that_matters_is_found(
    plans: Plans, alike: bytes, length: int
) -> None:
    assert plan(length) == plans.find(alike)


@pytest.mark.parametrize(
    "other",
    [
        b"",
        head(),
        head("A: c"),
        head("a: b"),
        head("A: b", "A: b"),
        head("A: b", "Expect: 100-continue"),
        head("A: b", "Transfer-Encoding: chunked"),
        head("A: b", length="Content-Length: 1001"),
        head("A: b", length="Content-Length: -5"),
        head("A: b", length="Content-Length: 5 "),
        head("A: b", length="Content-Length: 5, 5"),
        head("A: b", length="Content-Length : 5"),
        head("A: b", length="Content-Length: 5\r\nContent-Length: 5"),
        head("A: b", length="Content-Length: 5\r\nContent-Length: 6"),
        head("A: b", length="Content-Length: 5\nB: c"),
        head("A: b", length="Content-Length:\r\n 5"),
        head("A: b", "X-Request-Id : 2"),
        head("A: b", "X-Request-Id: 2\nB: c"),
        head("A: b", "X-Request-Id: 2\rB: c"),
        head("A: b", "X-Request-Id: 2\r\n folded"),
        head("A: b", "X-Request-Id: \xe9"),
        head("A: b", "X-Request-Id: " + "2" * 600),
        head("A: b", *["X-Request-Id: " + "2" * 500] * 9),
        head("A: b").replace(b"POST", b"PUT"),
        head("A: b").replace(b"/a ", b"/b "),
        b" " + head("A: b"),
    ],
)
def test_a_head_that_may_mean_something_else_is_not(plans: Plans, other: bytes) -> None:
    assert (None, None) == (plans.get(other), plans.find(other))


@pytest.mark.parametrize(
    "length", ["Content-Length: 5 ", "Content-Length:\t5", "Content-Length: 0000000005"]
)
def test_a_length_that_is_written_oddly_lets_no_second_one_pass(length: str) -> None:
    """The HTTP parser takes them as 5 each, and refuses two."""
    plans = Plans(10, MAX_LENGTH)
    plans.keep(head(length=length), plan())

    assert plan() == plans.get(head(length=length))
    for second in (length + "\r\nContent-Length: 50", "Content-Length: 50\r\n" + length):
        assert plans.find(head(length=second)) is None


def test_what_is_found_by_its_length_is_known_then(plans: Plans) -> None:
    found = plans.find(head("A: b", length="Content-Length: 77"))

    assert found is plans.get(head("A: b", length="Content-Length: 77"))


def test_what_differs_each_time_is_not_kept(plans: Plans) -> None:
    traced = head("A: b", "traceparent: 00-1")
    plans.find(traced)

    assert plans.get(traced) is None


def test_heads_of_large_bodies_and_long_heads_are_not_kept() -> None:
    plans = Plans(10, MAX_LENGTH)
    plans.keep(head(), plan(MAX_LENGTH + 1))
    plans.keep(head("A: " + "b" * 5000), plan())

    assert plans.find(head()) is None
    assert plans.get(head("A: " + "b" * 5000)) is None
