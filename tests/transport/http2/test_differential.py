"""Our HTTP/2 core and h2, fed with the same mutated conversations, give the same answers.

Compared frame by frame: frames sent, stream states, and error codes. A conversation is compared
up to its first difference. Intended differences are listed with their reasons.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

import pytest
from support.conversations import Conversation, mutated
from support.engines import own_engine_only
from support.frames import HEAD_BYTES, Error, Flag, Frame, Kind, parse
from support.http2_core import Core
from support.http2_reference import Reference

SEQUENCES = int(os.environ.get("HTTP2_SEQUENCES", "20_000"))
"""Total over all shards."""
SHARDS = 20

Said: TypeAlias = Mapping[int, tuple[object, ...]]
"""Answers of one step, by stream, and in order on each stream."""


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one part of a conversation on which both agreed up to then."""

    part: bytes
    first: bool
    """Whether the part directly follows the preface."""
    abandoned: bool
    """Whether the part is for a stream that we have reset."""
    ours: Said
    theirs: Said
    our_states: Mapping[int, str]
    their_states: Mapping[int, str]
    silent_end: bool
    """Whether h2 ended the connection without sending a GOAWAY."""

    @property
    def kind(self) -> int:
        """The type of the frame, if it is one."""
        return self.part[3] if len(self.part) >= HEAD_BYTES else -1

    @property
    def length(self) -> int:
        """Payload length in bytes, as the frame declares it."""
        return int.from_bytes(self.part[:3], "big")

    @property
    def partial(self) -> bool:
        """Whether the rest of the frame is missing."""
        return len(self.part) < HEAD_BYTES + self.length

    @property
    def their_end(self) -> str:
        """The code with which h2 ended the connection."""
        return _code(self.theirs, "GOAWAY")

    @property
    def our_end(self) -> str:
        """The code with which we ended the connection."""
        return _code(self.ours, "GOAWAY")

    @property
    def our_reset(self) -> str:
        """The code with which we reset a stream."""
        return _code(self.ours, "RST_STREAM")

    @property
    def their_reset(self) -> str:
        """The code with which h2 reset a stream."""
        return _code(self.theirs, "RST_STREAM")

    @property
    def has_headers(self) -> bool:
        """Whether the frame is part of a header block."""
        return self.kind in (Kind.HEADERS, Kind.CONTINUATION)

    @property
    def codes(self) -> tuple[str, str]:
        """The codes that ended the connection, ours first."""
        return self.our_end, self.their_end


def _code(said: Said, kind: str) -> str:
    answers = [answer for stream in said.values() for answer in stream]
    codes = [a.split()[1] for a in answers if isinstance(a, str) and a.startswith(kind)]
    return codes[0] if codes else ""


def _data_bytes(said: Said) -> int:
    answers = [answer for stream in said.values() for answer in stream]
    return sum(len(a.payload) for a in answers if isinstance(a, Frame) and a.kind == Kind.DATA)


WRONG, SIZE, CLOSED = "PROTOCOL_ERROR", "FRAME_SIZE_ERROR", "STREAM_CLOSED"
CALM = "ENHANCE_YOUR_CALM"
_HOST = b"\xa6"
"""An empty `host` header as an index into HPACK's static table."""

DIFFERENCES: Mapping[str, Callable[[Step], bool]] = {
    # # --- h2 ends the connection, ours continues ---
    "a malformed request costs its stream (8.1.1)": lambda step: (
        step.kind in (Kind.HEADERS, Kind.CONTINUATION, Kind.DATA)
        and (step.our_reset, step.their_end) == (WRONG, WRONG)
    ),
    "a stream too many is refused (5.1.2)": lambda step: (
        (step.our_reset, step.their_end) == ("REFUSED_STREAM", WRONG)
    ),
    "a window widened by 0 costs its stream (6.9)": lambda step: (
        step.kind == Kind.WINDOW_UPDATE
        and step.their_end == WRONG
        and (step.our_reset == WRONG or not step.ours)
        and not any(step.part[HEAD_BYTES:])
    ),
    "a wrong PRIORITY costs its stream (6.3; RFC 7540, 5.3.1)": lambda step: (
        step.kind == Kind.PRIORITY
        and step.our_reset in (WRONG, SIZE)
        and step.our_reset == step.their_end
    ),
    "what is past the window of a stream costs the stream (6.9.1)": lambda step: (
        step.our_reset == step.their_end == "FLOW_CONTROL_ERROR"
    ),
    "padding may take all of a frame (6.1, 6.2)": lambda step: (
        step.kind in (Kind.DATA, Kind.HEADERS)
        and step.their_end == WRONG
        and bool(step.part[4] & Flag.PADDED)
        and step.part[HEAD_BYTES] == int.from_bytes(step.part[:3], "big") - 1
    ),
    "h2 widens the windows of streams that are over, too (6.9.2)": lambda step: (
        step.kind == Kind.SETTINGS
        and step.their_end == "FLOW_CONTROL_ERROR"
        and [frame.kind for frame in step.ours.get(0, ()) if isinstance(frame, Frame)]
        == [Kind.SETTINGS]
    ),
    "a reserved bit is ignored (6.9)": lambda step: (
        step.kind == Kind.WINDOW_UPDATE
        and step.their_end == WRONG
        and step.part[HEAD_BYTES] >= 0x80
    ),
    "a type of frame that is not known is ignored (5.5)": lambda step: (
        step.kind > Kind.CONTINUATION and not step.ours and step.their_end == SIZE
    ),
    "the authority may be left out, and a host beside it is ignored (8.3.1)": lambda step: (
        step.has_headers
        and not step.our_end
        and not step.our_reset
        and step.their_end == WRONG
        and (b":authority" not in step.part or b"elsewhere" in step.part or _HOST in step.part)
    ),
    "a value may have spaces around it, as gRPC clients send them": lambda step: (
        step.has_headers
        and not step.our_end
        and not step.our_reset
        and step.their_end == WRONG
        and b"\2 b" in step.part
    ),
    "trailers may be empty (8.1)": lambda step: (
        step.has_headers and step.their_end == WRONG and not any(step.part[HEAD_BYTES + 1 :])
    ),
    # # --- ours ends or resets, h2 does not ---
    "what comes first is SETTINGS (3.4)": lambda step: (
        step.first and step.our_end == WRONG and step.kind != Kind.SETTINGS
    ),
    "SETTINGS with ACK do not come first (3.4)": lambda step: (
        step.first and step.our_end == WRONG and step.kind == Kind.SETTINGS and step.part[4] & 1 > 0
    ),
    "RST_STREAM for an idle stream (6.4)": lambda step: (
        step.kind == Kind.RST_STREAM and step.our_end == WRONG and not step.theirs
    ),
    "a client pushes nothing (8.4)": lambda step: (
        step.kind == Kind.PUSH_PROMISE and step.our_end == WRONG
    ),
    "a name is a token, content-length the number of the body (8.2.1, 8.1.1)": lambda step: (
        step.has_headers and step.our_reset == WRONG and not step.their_end
    ),
    # # --- both end or reset, with different codes ---
    "what cannot be decoded is COMPRESSION_ERROR (4.3)": lambda step: (
        step.codes == ("COMPRESSION_ERROR", WRONG)
    ),
    "a wrong length is FRAME_SIZE_ERROR (4.2)": lambda step: step.codes == (SIZE, WRONG),
    "CONTINUATION of nothing is PROTOCOL_ERROR (6.10)": lambda step: (
        step.kind == Kind.CONTINUATION
        and step.our_end == WRONG
        and CLOSED in (step.their_end, step.their_reset)
    ),
    "a frame that may not come is not looked into (4.3)": lambda step: (
        step.kind != Kind.SETTINGS and step.codes == (WRONG, SIZE)
    ),
    "a header block is judged by its first frame, and by its size as it grows": lambda step: (
        step.has_headers and (step.our_end == CALM or (step.our_end == WRONG and not step.theirs))
    ),
    "a stream that has ended has no window (6.9.2)": lambda step: (
        step.kind == Kind.SETTINGS
        and not step.our_end
        and step.their_end == "FLOW_CONTROL_ERROR"
        and not step.our_states
    ),
    "a frame is judged by its head, before it has come whole": lambda step: (
        step.partial and not step.theirs
    ),
    "a stream error may end the connection (5.4.1)": lambda step: (
        step.our_end == step.their_reset == CLOSED
    ),
    "another preface ends with a GOAWAY (3.4)": lambda step: (
        step.our_end == WRONG and step.silent_end
    ),
    # # --- both answer, or only h2 does ---
    "which stream goes on when the window of all opens is for each to decide": lambda step: (
        step.kind == Kind.WINDOW_UPDATE
        and 0 not in step.ours
        and 0 not in step.theirs
        and _data_bytes(step.ours) == _data_bytes(step.theirs) > 0
    ),
    "what comes for a stream that we have reset is ignored (5.1)": lambda step: (
        step.abandoned and not step.ours
    ),
}
"""Intended differences: the reason, with the section of RFC 9113, and how to recognize it."""


@own_engine_only
@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_core_and_h2_agree(shard: int, capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(f"http2 {shard}")
    counts: Counter[str] = Counter()
    for _ in range(SEQUENCES // SHARDS):
        said = mutated(random)
        step = first_difference(said, Random(len(said)))
        counts["the same" if step is None else _reason(step, said)] += 1

    with capsys.disabled():
        print(f"\nshard {shard}: {dict(counts.most_common())}", end=" ")
    assert counts.total() == SEQUENCES // SHARDS
    assert counts["the same"] > counts.total() // 2


def _reason(step: Step, said: Conversation) -> str:
    for reason, applies in DIFFERENCES.items():
        if applies(step):
            return reason
    pytest.fail(f"{step}\nin {b''.join(said).hex()}")


def first_difference(said: Conversation, random: Random) -> Step | None:
    """Feed both; return the first step in which they differ, or None."""
    ours, theirs = Core(), Reference()
    reset: set[int] = set()
    for at, part in enumerate(said):
        # Where a socket read ends inside a frame.
        cut = random.randrange(len(part)) if part and random.random() < 0.2 else 0
        our_answer = ours.receive(part[:cut]) + ours.receive(part[cut:])
        their_answer = theirs.receive(part)
        our_states, their_states = ours.states(), theirs.states()
        if our_answer != their_answer or our_states != their_states or ours.dead != theirs.dead:
            our_said, their_said = _said(our_answer), _said(their_answer)
            if our_said != their_said or (our_states != their_states and not theirs.dead):
                return Step(
                    part,
                    first=at == 1,
                    abandoned=int.from_bytes(part[5:HEAD_BYTES], "big") & 0x7FFF_FFFF in reset,
                    ours=our_said,
                    theirs=their_said,
                    our_states=our_states,
                    their_states=their_states,
                    silent_end=theirs.dead and not their_said,
                )
        if our_answer:
            reset |= {f.stream for f in parse(our_answer)[0] if f.kind == Kind.RST_STREAM}
        if ours.dead:
            break
    return None


def _said(answer: bytes) -> Said:
    """Normalize the answers, so that equivalent ones compare equal."""
    frames, rest = parse(answer)
    assert rest == b""
    said: dict[int, list[object]] = {}
    for frame in frames:
        if frame.kind == Kind.WINDOW_UPDATE:
            continue  # when a window is widened, and by how much, is free to choose
        answers = said.setdefault(frame.stream, [])
        if frame.kind == Kind.DATA and answers and isinstance(answers[-1], Frame):
            before = answers[-1]
            if before.kind == Kind.DATA:
                # Boundaries between DATA frames have no meaning.
                answers[-1] = frame._replace(payload=before.payload + frame.payload)
                continue
        answers.append(_told(frame))
    return {stream: tuple(answers) for stream, answers in said.items()}


def _told(frame: Frame) -> object:
    if frame.kind == Kind.GOAWAY:
        code = Error(int.from_bytes(frame.payload[4:8], "big")).name
        return f"GOAWAY {code} {int.from_bytes(frame.payload[:4], 'big')}"
    if frame.kind == Kind.RST_STREAM:
        return f"RST_STREAM {Error(int.from_bytes(frame.payload, 'big')).name}"
    return frame
