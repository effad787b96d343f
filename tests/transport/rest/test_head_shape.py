"""Head shapes: matching by shape gives the same result as comparing each line."""

from typing import NoReturn

import pytest

from xlaserve.http.connection import head_shape
from xlaserve.http.connection.head_shape import IN_A_ROW, ShapedPlans
from xlaserve.http.connection.plans import Plan, Plans
from xlaserve.http.messages import Answered, HttpResponse
from xlaserve.serving.call import Headers, Peer
from xlaserve.serving.inference import Pending

MAX_LENGTH = 1000


def begin(
    body: memoryview, done: Answered, headers: Headers, peer: Peer, opened: int
) -> HttpResponse | Pending:
    raise NotImplementedError


def head(*lines: str, first: str = "POST /a HTTP/1.1", length: str = "Content-Length: 5") -> bytes:
    return "\r\n".join([first, "Host: b.c", *lines, length, "", ""]).encode("latin-1")


def varying(number: int, length: str = "Content-Length: 5") -> bytes:
    return head(f"X-Request-Id: {number}", "A: b", f"traceparent: 00-{number:032x}", length=length)


def plan(length: int = 5) -> Plan:
    return Plan("POST", "/a", length, begin)


@pytest.fixture
def plans() -> Plans:
    """Plans of a server that has read one head."""
    plans = Plans(10, MAX_LENGTH)
    plans.keep(varying(0), plan())
    return plans


@pytest.fixture
def shaped(plans: Plans) -> ShapedPlans:
    """Plans of a connection that has learned a shape."""
    shaped = ShapedPlans(plans)
    for number in range(1, IN_A_ROW + 1):
        assert plan() == shaped.find(varying(number))
    return shaped


def look(line: object) -> NoReturn:
    raise AssertionError(line)


@pytest.mark.parametrize(
    ("alike", "length"),
    [
        (varying(77), 5),
        (varying(78, "Content-Length:    999"), 999),
        (varying(79, "Content-Length:0"), 0),
        (varying(80, "Content-Length: 000000007"), 7),
        (head("X-Request-Id:", "A: b", "traceparent: ~ :a: "), 5),
    ],
)
def test_heads_of_a_shape_are_found_without_a_look_at_each_line(
    shaped: ShapedPlans, alike: bytes, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed."""
    monkeypatch.setattr(head_shape, "essence_of", look)

    assert plan(length) == shaped.find(alike)


def test_a_shape_is_made_of_heads_in_a_row(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a shape costs more than reading a few heads: short connections make none."""
    shaped = ShapedPlans(plans)
    for number in range(1, 2 * IN_A_ROW - 1):
        assert plan() == shaped.find(varying(number))
        if number == IN_A_ROW - 1:
            plans.keep(head("A: c"), plan())
            assert plan() == shaped.find(head("A: c"))
    monkeypatch.setattr(head_shape, "essence_of", look)

    with pytest.raises(AssertionError):
        shaped.find(varying(1000))


@pytest.mark.parametrize(
    "other",
    [
        b"",
        varying(1, "Content-Length: 1001"),
        varying(1, "Content-Length: 1000000005"),
        varying(1, "Content-Length: 0000000005"),
        varying(1, "Content-Length: -5"),
        varying(1, "Content-Length: 5 "),
        varying(1, "Content-Length: "),
        varying(1, "Content-Length: 5\r\nContent-Length: 6"),
        varying(1, "Transfer-Encoding: chunked"),
        varying(1) + b"\r\n",
        varying(1)[:-2],
        b"\r\n" + varying(1),
        head("X-Request-Id: 1", "A: c", "traceparent: 1"),
        head("X-Request-Id: 1", "A: b", "traceparent: 1", first="POST /b HTTP/1.1"),
        head("X-Request-Id: 1", "A: b", "X-Request-Id: 2", "traceparent: 1"),
        head("X-Request-Id: 1", "A: b", "traceparent: 1\r\nExpect: 100-continue"),
        head("X-Request-Id: 1\n", "A: b", "traceparent: 1"),
        head("X-Request-Id: 1\r", "A: b", "traceparent: 1"),
        head("X-Request-Id: 1", "A: b", "traceparent: \t1"),
        head("X-Request-Id: 1", "A: b", "traceparent: \x001"),
        head("X-Request-Id: 1", "A: b", "traceparent: \xe9"),
        head("X-Request-Id: 1", "A: b", "traceparent: \x7f"),
        head("X-Request-Id : 1", "A: b", "traceparent: 1"),
        head("X-Request-Id: 1", "A: b", "traceparent"),
        varying(1).replace(b"b.c", b"bxc"),  # a dot is not a wildcard
    ],
)
def test_what_is_of_no_known_essence_is_left_to_the_general_path(
    shaped: ShapedPlans, plans: Plans, other: bytes
) -> None:
    assert (None, None) == (shaped.find(other), plans.find(other))


@pytest.mark.parametrize(
    "alike",
    [
        head("X-Request-Id: 1", "A: b"),
        head("traceparent: 1", "A: b", "X-Request-Id: 1"),
        head("x-request-id: 1", "A: b", "TraceParent: 1"),
        head("X-Request-Id: 1", "A: b", "traceparent: 1", "Authorization: Bearer a"),
    ],
)
def test_heads_of_other_shapes_are_found_line_by_line(shaped: ShapedPlans, alike: bytes) -> None:
    assert plan() == shaped.find(alike)


def test_two_lengths_of_which_one_is_none_make_no_wrong_shape(plans: Plans) -> None:
    """Which of the two is the length depends on the values."""
    lines = ("Content-Length: x", "X-Request-Id: 1")
    plans.keep(head(*lines), plan())
    shaped = ShapedPlans(plans)
    for _ in range(IN_A_ROW):
        assert plan() == shaped.find(head(*lines))
    other = head("Content-Length: 7", "X-Request-Id: 1")

    assert (None, None) == (shaped.find(other), plans.find(other))


def test_a_shape_keeps_no_plan(shaped: ShapedPlans, plans: Plans) -> None:
    """The plan of a head is looked up in the server's table each time."""
    newer = Plan("POST", "/a", 5, begin, finish=lambda answer, account: None)
    plans.keep(varying(0), newer)

    assert newer is shaped.find(varying(1000))
