"""M1 and M3: long series of requests, and aborted answers."""

import asyncio
import time
from pathlib import Path

from support import hoarders
from support.hoarders import Hoarder, hoarding, push
from support.victim import infer_request

from acceptance.asking import SECONDS, Tally, ask_many, clients
from acceptance.figures import MIB, Outcome, growth, level, percentile
from acceptance.subjects import Subject, export_models, serving, spoil

_CONNECTIONS = 8
_SAMPLES = 100
_AT_ONCE = 100
"""Answers that are aborted at the same time."""
_BACK_SECONDS = 5.0


def mixed(
    folder: Path, *, count: int = 100_000, spoiled: str = "", seconds: float = SECONDS
) -> Outcome:
    """Send requests of all kinds over eight connections, and check every answer.

    `spoiled` names a defect to build into a model, which the check must detect.
    """
    export_models(folder / "models")
    if spoiled:
        spoil(folder / "models", spoiled)
    outcome = Outcome()
    with serving(folder) as subject:
        asyncio.run(_mixed(subject, count, seconds, outcome))
    return outcome


async def _mixed(subject: Subject, count: int, seconds: float, outcome: Outcome) -> None:
    tally, resident = Tally(), list[float]()
    async with clients(subject.grpc, subject.http, _CONNECTIONS, seconds) as found:
        for part in range(_SAMPLES):
            await ask_many(found, max(1, count // _SAMPLES), tally, seed=part)
            resident.append(subject.held_bytes())
            if len(tally.lost) >= 100:
                break
    outcome.note("requests", f"{tally.asked} of {len(tally.kinds)} kinds")
    outcome.none("wrong answers", tally.wrong)
    outcome.none("not answered", tally.lost)
    grown = growth(resident)
    allowed = max(10 * MIB, 0.01 * level(resident))
    outcome.at_most("memory in the second half", round(grown / MIB, 2), allowed / MIB, " MiB")
    p50, p99 = (percentile(tally.seconds, rank) * 1e3 for rank in (50, 99))
    outcome.note("p50 and p99", f"{p50:.1f} and {p99:.1f} ms")


def aborted(folder: Path, *, count: int = 1000, keeps: bool = False) -> Outcome:
    """Request answers of 10 MiB with a closed window, then disconnect; `keeps` stays connected."""
    export_models(folder / "models")
    outcome, message = Outcome(), infer_request("wide", 1)
    opening = hoarders.grpc_opening(0)
    asking = hoarders.grpc_requests(message, range(1, 2 * _AT_ONCE // 10, 2))
    with serving(folder, max_requests_per_model=100_000) as subject:
        _abort_some(subject, opening, asking, 2)
        time.sleep(1)
        before = subject.held_bytes()
        subject.forget_peak()
        for _ in range(count // _AT_ONCE):
            _abort_some(subject, opening, asking, 10)
        outcome.note("answers of 10 MiB", count)
        outcome.note("most", f"{(subject.peak_bytes() - before) / MIB:+.0f} MiB")
        if keeps:
            with hoarding(lambda: Hoarder(subject.grpc, opening, asking), 10) as kept:
                push(kept)
                time.sleep(1)
                _settle(subject, before, outcome)
        else:
            _settle(subject, before, outcome)
    return outcome


def _abort_some(subject: Subject, opening: bytes, asking: bytes, connections: int) -> None:
    with hoarding(lambda: Hoarder(subject.grpc, opening, asking), connections) as some:
        push(some)
        # Let the answers be ready before their clients disconnect.
        time.sleep(0.3)


def _settle(subject: Subject, before: int, outcome: Outcome) -> None:
    time.sleep(_BACK_SECONDS)
    grown = round((subject.held_bytes() - before) / MIB, 1)
    outcome.at_most(f"memory {_BACK_SECONDS:g} s behind them", grown, 64, " MiB")
