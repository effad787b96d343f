"""H1 to H4: attacks on a server while a client measures that it is not affected."""

import asyncio
import gzip
import resource
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support.floods import ATTACKS, CALM, CLOSED, INFER, Attack, Attacker
from support.frames import data, headers, literals
from support.http import chunked, connect, message
from support.victim import Target, export_models
from support.wire import request_headers

from acceptance.figures import MIB, Outcome
from acceptance.subjects import Launch, Subject
from acceptance.victim_process import Seen, victim
from xlaserve.settings import Settings

_TRIES = 3
"""Attempts per attack; the shortest latency counts, as other load only adds to it."""
_BACK_SECONDS = 10.0
"""How long to wait for memory to be freed: buffers of long messages are kept for 5 s."""
_SETTLE_SECONDS = 0.5
_LATE_SECONDS = 0.5
"""Tolerance for noticing a closed connection on a busy machine."""
_MOST_MIB = 64
_HOLDING = frozenset(
    {
        "4 MB of a message, 20 times",
        "a message of 4 GB is announced, and 16 MB come",
        "answers of 2 MB, 100 times, and no window",
        "answers of 2 MB, 20 times, of which none is read, 5 times",
        "a message of 65 MB",
        "1 GB in 1 MB of gzip",
    }
)
"""Floods that make a server hold as much memory as it may."""
_CHUNKED = ("Transfer-Encoding", "chunked")


def _server(folder: Path, **flags: object) -> Launch:
    export_models(folder / "models")
    return Launch(folder, {"max_requests_per_model": 100_000, "load_model": "*"} | flags)


def flood(folder: Path, *, names: tuple[str, ...] = tuple(ATTACKS), timed: bool = True) -> Outcome:
    """Run each attack against a server; `timed` judges latencies.

    How much memory clients may occupy is a setting; its default of 1 GiB exceeds the criterion, so
    the first server has a lower limit. A second server with the default is judged by that limit.
    """
    limits = {"max_message_bytes": 16 * MIB, "max_held_bytes": 40 * MIB}
    outcome = Outcome()
    _flood(_server(folder, **limits), names, outcome, _Bounds("", _MOST_MIB, timed=timed))
    held = [name for name in names if name in _HOLDING]
    most = Settings(repository=folder).max_held_bytes / MIB + _MOST_MIB
    if held:
        _flood(_server(folder), held, outcome, _Bounds("by default, ", most, timed=timed))
    return outcome


def _flood(launch: Launch, names: Iterable[str], outcome: Outcome, bounds: "_Bounds") -> None:
    try:
        subject = launch.start()
        with victim(subject.grpc):
            time.sleep(_SETTLE_SECONDS)  # warm up every path, including its buffers
        for name in names:
            _judge(subject, name, outcome, bounds)
        what = f"{bounds.called}server"
        outcome.add(what, subject.is_running, "runs", holds=subject.is_running)
    finally:
        launch.stop()


def _judge(subject: Subject, name: str, outcome: Outcome, bounds: "_Bounds") -> None:
    attack, timed = ATTACKS[name], bounds.timed
    tries = [_attack(subject, attack)]
    while timed and tries[-1].worst_ms >= 100 and len(tries) < _TRIES:
        tries.append(_attack(subject, attack))
    called = f"{bounds.called}{name}"
    worst = min(one.worst_ms for one in tries)
    outcome.none(f"{called}, errors of others", [text for one in tries for text in one.seen.errors])
    became = tries[0].became
    shown = ", ".join(sorted(became))
    allowed = ", ".join(sorted(attack.outcomes))
    outcome.add(
        f"{called}, its end", shown, allowed, holds=bool(became) and became <= attack.outcomes
    )
    if timed:
        outcome.at_most(f"{called}, worst of others", round(worst, 1), 100, " ms")
    outcome.at_most(
        f"{called}, memory", max(one.peak_mib for one in tries), bounds.most_mib, " MiB"
    )
    outcome.at_most(f"{called}, memory behind it", tries[-1].left_mib, 16, " MiB")
    cpu = round(min(one.cpu_seconds for one in tries), 2)
    if timed and became == {CALM}:
        outcome.at_most(f"{called}, CPU", cpu, 1, " s")
    else:
        outcome.note(f"{called}, CPU", f"{cpu} s")


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Limits for floods of one server."""

    called: str
    most_mib: float
    """Limit on memory during a flood."""
    timed: bool


class _Try:
    """One run of an attack, and its effects."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.became: set[str] = set()
        self.peak_mib = self.left_mib = self.cpu_seconds = 0.0

    @property
    def worst_ms(self) -> float:
        """Return the latency of the victim's slowest call."""
        return self.seen.worst_seconds * 1e3


def _attack(subject: Subject, attack: Attack) -> _Try:
    target = Target(subject.process, subject.grpc)
    before, cpu = subject.resident_bytes(), target.cpu_seconds()
    subject.forget_peak()
    with victim(subject.grpc) as seen:
        one = _Try(seen)
        one.became = attack.run(subject.grpc)
    one.peak_mib = round((subject.peak_bytes() - before) / MIB, 1)
    one.cpu_seconds = target.cpu_seconds() - cpu
    end = time.monotonic() + _BACK_SECONDS
    while subject.resident_bytes() - before > 16 * MIB and time.monotonic() < end:
        time.sleep(0.05)
    one.left_mib = round((subject.resident_bytes() - before) / MIB, 1)
    return one


# --- H2: oversized bodies ----------------------------------------------------------------------


def oversized(folder: Path) -> Outcome:
    """Announce a body of 4 GiB, send 65 MiB, and send gzip that expands to 1 GiB."""
    outcome, launch = Outcome(), _server(folder)
    announced = bytes(1) + (2**32 - 1).to_bytes(4, "big")
    real = bytes(1) + (65 * MIB).to_bytes(4, "big") + bytes(65 * MIB)
    bomb = gzip.compress(bytes(1 << 28), 9) * 4
    bombed = b"\1" + len(bomb).to_bytes(4, "big") + bomb
    try:
        subject = launch.start()
        _status(subject, announced)
        for name, body, most, lines in (
            ("4 GiB announced", announced, 1, ()),
            ("65 MiB sent", real, 1, ()),
            ("1 GiB in gzip", bombed, 80, (("grpc-encoding", "gzip"),)),
        ):
            before = subject.resident_bytes()
            subject.forget_peak()
            status = _status(subject, body, *lines)
            holds = status == {"8"}
            outcome.add(f"{name}, status", ",".join(status), "8, RESOURCE_EXHAUSTED", holds=holds)
            grown = round((subject.peak_bytes() - before) / MIB, 2)
            outcome.at_most(f"{name}, memory", grown, most, " MiB")
    finally:
        launch.stop()
    return outcome


def _status(subject: Subject, body: bytes, *lines: tuple[str, str]) -> set[str]:
    attacker = Attacker(subject.grpc)
    try:
        attacker.send(headers(1, literals(request_headers(INFER, *lines))))
        for at in range(0, len(body), 16_384):
            is_last = len(body) > 5 and at + 16_384 >= len(body)
            attacker.send(data(1, body[at : at + 16_384], end_stream=is_last))
            if attacker.statuses():
                break
        attacker.read(lambda: bool(attacker.statuses()))
        return {status for status in attacker.statuses() if status.isdigit()}
    finally:
        attacker.close()


# --- H3: silent connections --------------------------------------------------------------------


def silent(folder: Path, *, count: int = 2000) -> Outcome:
    """Open `count` connections to a server with default limits and send nothing."""
    seconds = Settings(repository=folder).preface_seconds
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 4000), hard))
    outcome, launch = Outcome(), _server(folder)
    try:
        subject = launch.start()
        before = subject.resident_bytes()
        subject.forget_peak()
        with ExitStack() as stack:
            attackers: list[Attacker] = []
            for _ in range(count):
                attackers.append(Attacker(subject.grpc, greets=False))
                stack.callback(attackers[-1].close)
            # Wait until each is accepted: the server then sends its SETTINGS.
            for attacker in attackers:
                attacker.read(partial(_is_greeted, attacker))
            connected = time.monotonic()
            # Connections beyond the limit are accepted only once the first ones are dropped.
            while not all(attacker.ended for attacker in attackers):
                for attacker in attackers:
                    attacker.look()
                if time.monotonic() - connected > 10 * seconds:
                    break
            last = time.monotonic() - connected
            with victim(subject.grpc) as seen:
                time.sleep(_SETTLE_SECONDS)
            codes = {attacker.goaway or CLOSED for attacker in attackers}
        outcome.none("not dropped", [a.outcome for a in attackers if not a.ended])
        most = seconds + _LATE_SECONDS
        outcome.at_most("dropped behind the last accept", round(last, 1), most, " s")
        kib = round((subject.peak_bytes() - before) / count / 1024, 1)
        outcome.at_most("memory of each", kib, 16, " KiB")
        outcome.none("errors of a new client", seen.errors)
        outcome.at_most("its worst call", round(seen.worst_seconds * 1e3, 1), 100, " ms")
        outcome.note("told", ", ".join(sorted(codes)))
    finally:
        launch.stop()
    return outcome


def _is_greeted(attacker: Attacker) -> bool:
    return bool(attacker.came)


# --- H4: many chunks ---------------------------------------------------------------------------


def chunks(folder: Path, *, times: int = 100, count: int = 1_000_000) -> Outcome:
    """Send bodies with more chunks than the server allows."""
    outcome, launch = Outcome(), _server(folder)
    try:
        subject = launch.start()
        statuses = asyncio.run(_send_chunks(subject, [65_537] * 5 + [count] * 20))
        before = subject.resident_bytes()
        statuses += asyncio.run(_send_chunks(subject, [count] * times))
        grown = round((subject.resident_bytes() - before) / MIB, 2)
        others = [str(status) for status in statuses if status not in (400, 413)]
        outcome.note("bodies", f"5 of 65 537 chunks, {times} of {count} and 20 before")
        outcome.none("answers other than 400 and 413", others)
        outcome.at_most("memory behind them", grown, 1, " MiB")
    finally:
        launch.stop()
    return outcome


async def _send_chunks(subject: Subject, counts: list[int]) -> list[int]:
    statuses = []
    head = message("POST", "/v2/models/echo/infer", _CHUNKED, length=None)
    bodies: dict[int, Any] = {count: head + chunked(*[b"x"] * count) for count in set(counts)}
    for count in counts:
        async with connect(subject.http) as client:
            sending = asyncio.ensure_future(client.send(bodies[count]))
            statuses.append((await client.answer()).status)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        with suppress(OSError):
            await client.writer.wait_closed()
    return statuses
