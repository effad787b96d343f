"""D7: clients that cancel requests at each of six points, and the resources left afterwards."""

import time
import urllib.request
from pathlib import Path

from support import frames
from support.floods import INFER, Attacker
from support.frames import Setting, data, headers, literals
from support.victim import ECHOED_BYTES, export_models, infer_request
from support.wire import framed, request_headers

from acceptance.figures import MIB, Outcome
from acceptance.subjects import Subject, serving

_AT_ONCE = 100
"""Requests on one connection; it may reset 200 in half a minute."""
_BLOCK = literals(request_headers(INFER))
_ECHO = framed(infer_request("echo", ECHOED_BYTES // 4))
_WIDE = framed(infer_request("wide", 1))
_SETTLE_SECONDS = 20.0

POINTS = {
    "behind the headers": (b"", False, False),
    "within the message": (_ECHO[:100], False, False),
    "behind the message": (_ECHO, True, False),
    "while it is executed": (_WIDE, True, False),
    "while the answer waits for a window": (_WIDE, True, True),
    "at a deadline of 1 ms": (_ECHO, True, False),
}
"""For each point: the bytes sent, whether they end the stream, and whether the window is closed."""


def cancel(folder: Path, *, count: int = 1000) -> Outcome:
    """Cancel `count` requests at each point, half by RST_STREAM and half by disconnecting."""
    export_models(folder / "models")
    outcome = Outcome()
    with serving(folder, max_stream_resets=10_000) as subject:
        _cancel_at(subject, "while it is executed", _AT_ONCE)
        before = subject.held_bytes()
        for point in POINTS:
            _cancel_at(subject, point, count)
            outcome.none(f"{point}: slots that are not free", _left(subject))
        # The server keeps buffers of long messages for some seconds, for reuse.
        end = time.monotonic() + _SETTLE_SECONDS
        while subject.held_bytes() - before > 64 * MIB and time.monotonic() < end:
            time.sleep(0.2)
        grown = round((subject.held_bytes() - before) / MIB, 1)
        outcome.note("cancelled at each point", count)
        outcome.at_most("memory behind them", grown, 64, " MiB")
        outcome.add("an inference behind it", "", "right", holds=_answers(subject))
    return outcome


def _cancel_at(subject: Subject, point: str, count: int) -> None:
    octets, ends, waits = POINTS[point]
    lines = [("grpc-timeout", "1m")] if "deadline" in point else []
    block = literals(request_headers(INFER, *lines))
    for turn in range(-(-count // _AT_ONCE)):
        attacker = Attacker(subject.grpc, (Setting.INITIAL_WINDOW_SIZE, 0 if waits else 65_535))
        streams = range(1, 2 * _AT_ONCE, 2)
        for stream in streams:
            attacker.send(headers(stream, block))
            if octets:
                attacker.send(data(stream, octets, end_stream=ends))
        if waits:
            time.sleep(0.2)
        if turn % 2:
            attacker.send(*(frames.rst_stream(stream) for stream in streams))
            attacker.look()
        attacker.close()


def _left(subject: Subject) -> list[str]:
    """Return the work still in progress after a grace period."""
    end = time.monotonic() + _SETTLE_SECONDS
    while (found := _held(subject)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _held(subject: Subject) -> list[str]:
    with urllib.request.urlopen(f"http://{subject.http}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    counted = (
        "xlaserve_requests_in_progress",
        "nv_inference_pending_request_count",
        'xlaserve_connections{protocol="grpc"}',
    )
    return [line for line in lines if line.startswith(counted) and float(line.split()[-1])]


def _answers(subject: Subject) -> bool:
    attacker = Attacker(subject.grpc)
    try:
        attacker.send(headers(1, _BLOCK), data(1, _ECHO, end_stream=True))
        attacker.read(lambda: bool(attacker.statuses()))
        return attacker.statuses() == {"0"}
    finally:
        attacker.close()
