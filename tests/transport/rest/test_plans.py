"""Request heads that match a cached plan, and heads that only resemble one."""

import sys
from collections.abc import Iterable

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from xlaserve.http.connection.heads import GENERAL_PATH, deciding
from xlaserve.http.connection.plans import (
    DECIDING_PREFIXES,
    IDLE_NAMES,
    IDLE_PREFIXES,
    Plan,
    Plans,
    is_idle,
)
from xlaserve.http.messages import Answered, HttpResponse
from xlaserve.http.sagemaker.sagemaker_bodies import PARAMETER_HEADERS as SAGEMAKER_HEADERS
from xlaserve.http.v2.infer_response import HEADER_LENGTH
from xlaserve.serving.call import Headers, Peer
from xlaserve.serving.inference import Pending

MAX_LENGTH = 1000


def begin(
    body: memoryview, done: Answered, headers: Headers, peer: Peer, opened: int
) -> HttpResponse | Pending:
    raise NotImplementedError


def head(*lines: str, length: str = "Content-Length: 5") -> bytes:
    return "\r\n".join(["POST /a HTTP/1.1", "Host: b", *lines, length, "", ""]).encode("latin-1")


def plan(length: int = 5) -> Plan:
    return Plan("POST", "/a", length, begin)


@pytest.fixture
def plans() -> Plans:
    """Plans of a server that has read one head."""
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
        head("A: b", "X-Request-Id: 2", "x-request-id: 2"),
        head("A: b", "X-Request-Id"),
        head("A: b", ": 2"),
        head("A: b", "X Y: 2"),
        head("A: b", "X-Amzn-SageMaker-Target-Model: 2"),
        head("A: b", "Sec-Fetch-Site: cross-site"),
        head("A: b", "Accept-Encoding: gzip"),
        head("A: b", "Content-Type: text/plain"),
        head("A: b", "Inference-Header-Content-Length: 5"),
        head("A: b", "Connection: close"),
        head("A: b", *[f"X-{number}: 2" for number in range(100)]),
        head("A: b", "Authorization: \t2"),
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
    """The HTTP parser reads each of them as 5, and refuses two."""
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


def test_what_comes_again_is_kept(plans: Plans) -> None:
    """Each client repeats its own user agent and token."""
    known = head("A: b", "User-Agent: c", "Authorization: Bearer d")
    for _ in range(2):
        plans.find(known)

    assert plan() == plans.get(known)


def test_headers_that_vary_are_of_one_plan(plans: Plans) -> None:
    """Counted, not timed: no head takes the general path, and none is cached."""
    for number in range(1000):
        fields = [
            f"User-Agent: agent/{number}",
            f"Cookie: a={number}; b={number}",
            f"Authorization: Bearer {number:0512}",
            f"X-Tenant: {number}",
            f"baggage: user={number}",
        ]
        varying = head("A: b", *fields, length=f"Content-Length: {number}")

        assert plan(number) == plans.find(varying)
        assert plans.get(varying) is None

    assert 256 >= len(plans._once)


@pytest.mark.parametrize("table", [IDLE_NAMES, DECIDING_PREFIXES, IDLE_PREFIXES])
def test_names_are_compared_in_lower_case(table: Iterable[str]) -> None:
    assert [name.lower() for name in table] == list(table)


@pytest.mark.parametrize(
    "name",
    [
        *GENERAL_PATH,
        *SAGEMAKER_HEADERS,
        HEADER_LENGTH,
        "Accept",
        "Accept-Encoding",
        "Connection",
        "Content-Length",
        "Content-Type",
        "Host",
        "Keep-Alive",
    ],
)
def test_what_decides_is_not_idle(name: str) -> None:
    assert not is_idle(name.lower())


def test_no_plan_is_made_from_an_idle_header() -> None:
    """The next request of the plan may have another value for it."""
    headers = CIMultiDict({"X-Tenant": "a", "AUTHORIZATION": "b", "Accept": "c"})

    assert {"Accept": "c"} == dict(deciding(CIMultiDictProxy(headers)))


def test_heads_of_large_bodies_and_long_heads_are_not_kept() -> None:
    plans = Plans(10, MAX_LENGTH)
    plans.keep(head(), plan(MAX_LENGTH + 1))
    plans.keep(head("A: " + "b" * 5000), plan())

    assert plans.find(head()) is None
    assert plans.get(head("A: " + "b" * 5000)) is None


@pytest.mark.parametrize("octets", [65, 16 << 10])
@pytest.mark.parametrize(("prefix", "idle"), [("x-", True), ("y-", False)])
def test_no_cache_keeps_a_long_name(prefix: str, octets: int, *, idle: bool) -> None:
    name = prefix + "n" * (octets - len(prefix))
    held = sys.getrefcount(name)

    assert idle == is_idle(name)
    assert held == sys.getrefcount(name)
