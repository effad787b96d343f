"""W3C Trace Context: how a client names its span, and which headers are ignored."""

import pytest

from xlaserve.serving.observability.spans import TraceParent, trace_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_trace_of_a_client_is_read() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1,b=2"}

    assert TraceParent(int(TRACE, 16), int(SPAN, 16), True, "a=1,b=2") == trace_parent(headers)


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True)])
def test_one_flag_says_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    found = trace_parent({"traceparent": f"00-{TRACE}-{SPAN}-{flags}"})

    assert found is not None
    assert sampled is found.sampled


def test_a_later_version_may_say_more() -> None:
    assert trace_parent({"traceparent": f"01-{TRACE}-{SPAN}-01-what"}) is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-what",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        "x" * (1 << 20),
    ],
)
def test_what_is_malformed_is_ignored(text: str) -> None:
    """A new trace begins instead (W3C Trace Context, 3.2.2)."""
    assert trace_parent({"traceparent": text}) is None


def test_a_long_state_is_not_passed_on() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=" + "1" * 600}
    found = trace_parent(headers)

    assert found is not None
    assert "" == found.state
