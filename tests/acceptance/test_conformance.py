"""Answers to protobuf's conformance runner, and the evaluation of its report."""

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import betterproto
import pytest
from support.protobuf import Everything

from acceptance import conformance, testee
from acceptance.figures import Outcome

TYPE = "protobuf_test_messages.proto3.TestAllTypesProto3"
PROTOBUF, JSON = 1, 2


@dataclass(eq=False, repr=False)
class Request(betterproto.Message):
    """The fields in use of the runner's requests, with their numbers."""

    protobuf_payload: bytes = betterproto.bytes_field(1, group="payload")
    json_payload: str = betterproto.string_field(2, group="payload")
    requested_output_format: int = betterproto.int32_field(3)
    message_type: str = betterproto.string_field(4)


@dataclass(eq=False, repr=False)
class Response(betterproto.Message):
    """The fields in use of the responses."""

    parse_error: str = betterproto.string_field(1, group="result")
    protobuf_payload: bytes = betterproto.bytes_field(3, group="result")
    skipped: str = betterproto.string_field(5, group="result")
    serialize_error: str = betterproto.string_field(6, group="result")


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, Any]]:
    """Send a request to the testee; return the kind of its answer and the content."""
    runner, messages = ModuleType("messages.conformance"), ModuleType("messages.proto3")
    vars(runner).update(ConformanceRequest=Request, ConformanceResponse=Response)
    vars(messages).update(TestAllTypesProto3=Everything)
    monkeypatch.setitem(sys.modules, "messages", ModuleType("messages"))
    monkeypatch.setitem(sys.modules, "messages.conformance", runner)
    monkeypatch.setitem(sys.modules, "messages.protobuf_test_messages", ModuleType("messages.p"))
    monkeypatch.setitem(sys.modules, "messages.protobuf_test_messages.proto3", messages)
    answer = testee.answerer()

    def asked(**fields: Any) -> tuple[str, Any]:
        given: Any = {"requested_output_format": PROTOBUF, "message_type": TYPE} | fields
        request, written = bytes(Request(**given)), io.BytesIO()
        framed = len(request).to_bytes(4, "little") + request
        testee.serve(io.BytesIO(framed), written, answer)
        size, octets = written.getvalue()[:4], written.getvalue()[4:]
        assert int.from_bytes(size, "little") == len(octets)
        kind, value = betterproto.which_one_of(Response().parse(octets), "result")
        return kind, value

    return asked


def test_a_message_is_read_and_written_again(ask: Callable[..., tuple[str, Any]]) -> None:
    sent = bytes(Everything(int32=-1, texts=["a", ""], by_text={"k": b"x"}))

    assert ("protobuf_payload", sent) == ask(protobuf_payload=sent)


def test_a_message_that_is_cut_off_is_an_error_of_parsing(
    ask: Callable[..., tuple[str, Any]],
) -> None:
    kind, said = ask(protobuf_payload=b"\x0a\x05ab")

    assert "parse_error" == kind
    assert said


@pytest.mark.parametrize(
    "fields",
    [
        {"json_payload": "{}"},
        {"protobuf_payload": b"", "requested_output_format": JSON},
        {"protobuf_payload": b"", "message_type": "protobuf_test_messages.proto2.TestAllTypes"},
    ],
    ids=["from JSON", "to JSON", "of proto2"],
)
def test_what_a_codec_of_binary_proto3_does_not_do_is_skipped(
    ask: Callable[..., tuple[str, Any]], fields: dict[str, Any]
) -> None:
    assert "skipped" == ask(**fields)[0]


# --- its report --------------------------------------------------------------------------------

PASSED = """
WARNING, test=Recommended.Proto3.ProtobufInput.A.ProtobufOutput: Output was not equivalent
CONFORMANCE SUITE PASSED: 667 successes, 2081 skipped, 2 expected failures, 0 unexpected failures.
CONFORMANCE SUITE PASSED: 0 successes, 434 skipped, 0 expected failures, 0 unexpected failures.
"""
FAILED = """
These tests failed.
  Required.Proto3.ProtobufInput.B.ProtobufOutput # Should have failed to parse, but didn't.

CONFORMANCE SUITE FAILED: 666 successes, 2081 skipped, 2 expected failures, 1 unexpected failures.
"""


@pytest.mark.parametrize(
    ("said", "status", "failing"),
    [
        (PASSED, 0, []),
        (PASSED, 1, ["status of the runner"]),
        (FAILED, 1, ["tests that failed", "status of the runner"]),
        (PASSED.replace("667", "66"), 0, ["tests that succeeded"]),
        ("libc is too old", 1, ["tests that succeeded", "status of the runner"]),
    ],
)
def test_a_report_is_judged(said: str, status: int, failing: list[str]) -> None:
    outcome = Outcome()
    conformance.judge(said, status, outcome)

    assert failing == outcome.failing


def test_a_runner_that_is_not_there_fails_where_tools_are_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delenv("PROTOBUF_CONFORMANCE", raising=False)
    monkeypatch.setenv("REQUIRE_TOOLS", "1")
    assert ["runner"] == conformance.conform(tmp_path).failing

    monkeypatch.setenv("REQUIRE_TOOLS", "0")
    assert [] == conformance.conform(tmp_path).failing
