"""M4: all kinds of clients at once; leaving one out shows which one causes growth."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from acceptance import crowd_bad, crowd_good
from acceptance.books import Books, Counts, differences, read
from acceptance.crowd import Kind, Stage, attend
from acceptance.figures import MIB, Outcome, growth, level
from acceptance.subjects import Launch, Subject
from xlaserve.serving.returning import EXCESS_BYTES

KINDS: tuple[Kind, ...] = (*crowd_good.KINDS, *crowd_bad.KINDS)
NAMES = tuple(kind.name for kind in KINDS)

_SETTLE_SECONDS = 60.0
"""How long pending work may take to finish after the last client has disconnected."""
_SAMPLES = 240
_LEAST_EVERY_SECONDS = 0.25
_SETTLED = (
    "xlaserve_requests_in_progress",
    "xlaserve_connections",
    "nv_inference_pending_request_count",
    "xlaserve_abandoned_work",
)
_TRIED = "xlaserve.runtime.trial"
"""Module run by the trial processes of loads, which end with the load."""
_SPARE = 'kind="spare"'
"""Label of the memory that the ledger keeps for upcoming requests."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The server's resources at one moment."""

    seconds: float
    memory_bytes: int
    """Resident memory of the server's own process."""
    children: Mapping[str, Sequence[int]]
    """Resident memory of each child process, by the module it runs."""
    files: int
    threads: int
    held_bytes: float
    """Bytes held for clients, by the server's ledger."""
    booked_bytes: float
    """Bytes reserved for models."""
    booked: Mapping[str, int]
    """Bytes reserved for each loaded model."""


def everything(
    folder: Path,
    *,
    seconds: float = 3600,
    without: Sequence[str] = (),
    most_mib: float = 10,
    kept_mib: float = EXCESS_BYTES / MIB,
    kinds: Sequence[Kind] = KINDS,
) -> Outcome:
    """Run every kind of client for some seconds, then compare their counts with the server's.

    `most_mib`: allowed memory growth, in addition to the `kept_mib` of free memory that the server
    keeps until it trims.
    """
    chosen = [kind for kind in kinds if kind.name not in without]
    models = folder / "models"
    models.mkdir(parents=True)
    for kind in chosen:
        kind.write(models)
    outcome = Outcome()
    flags = {
        "allow_python_models": True,
        "max_message_bytes": crowd_bad.MESSAGE_BYTES,
        "cors_origin": crowd_good.ORIGIN,
    }
    launch = Launch(folder, flags)
    try:
        subject = launch.start()
        books = {kind.name: Books(kind.models) for kind in chosen}
        before = _metrics(subject)
        samples = asyncio.run(_meet(subject, models, chosen, books, seconds))
        after = _settled(subject)
        trials = [f"{held} bytes" for held in subject.of_children().get(_TRIED, ())]
        _write(folder / "samples.jsonl", samples)
        outcome.note("left out", ", ".join(without) or "nobody")
        _judge_clients(books, outcome)
        _judge_counts(books, before, after, outcome)
        _judge_growth(samples, most_mib, kept_mib, outcome)
        _judge_booked(samples, _records(launch.log), outcome)
        outcome.note("memory of children", _of_children(samples))
        outcome.none("trial loads that go on", trials)
        outcome.none("records of errors in the log", _errors(launch.log))
        outcome.at_most("status of the exit", abs(launch.stop()), 0)
    finally:
        if launch.process is not None:
            launch.process.kill()
            launch.process.wait()
    return outcome


async def _meet(
    subject: Subject,
    models: Path,
    chosen: Sequence[Kind],
    books: Mapping[str, Books],
    seconds: float,
) -> list[Sample]:
    stage = Stage(subject, models, asyncio.Event())
    samples, began = list[Sample](), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for kind in chosen:
            for number in range(kind.clients):
                group.create_task(attend(stage, kind, number, books[kind.name]))
        while (now := time.monotonic() - began) < seconds:
            samples.append(await asyncio.to_thread(_sample, subject, now))
            await asyncio.sleep(max(_LEAST_EVERY_SECONDS, seconds / _SAMPLES))
        stage.is_over.set()
    return samples


def _metrics(subject: Subject) -> str:
    with urllib.request.urlopen(f"http://{subject.http}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def _values(metrics: str, name: str) -> Iterable[tuple[str, float]]:
    """Yield the labels and the value of each sample of a metric."""
    for line in metrics.splitlines():
        head, _, value = line.rpartition(" ")
        found, _, labels = head.partition("{")
        if found == name:
            yield labels, float(value)


def _sample(subject: Subject, now: float) -> Sample:
    metrics = _metrics(subject)
    held = (
        value for labels, value in _values(metrics, "xlaserve_held_bytes") if _SPARE not in labels
    )
    return Sample(
        round(now, 1),
        int(subject.process.memory_info().rss),
        subject.of_children(),
        subject.open_files(),
        subject.threads(),
        sum(held),
        sum(value for _, value in _values(metrics, "xlaserve_capacity_used_bytes")),
        _booked(subject),
    )


def _booked(subject: Subject) -> dict[str, int]:
    with urllib.request.urlopen(f"http://{subject.http}/status.json", timeout=60) as answer:
        rows = json.load(answer)["models"]
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["name"]] = sizes.get(row["name"], 0) + (row.get("size_bytes") or 0)
    return sizes


def _write(path: Path, samples: Sequence[Sample]) -> None:
    path.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))


# --- Judgement ---------------------------------------------------------------------------------


def _left(metrics: str) -> list[str]:
    """Return unfinished work, except the metrics request itself."""
    found = [
        f"{name}{{{labels} {value:g}"
        for name in _SETTLED
        for labels, value in _values(metrics, name)
        if value > ('protocol="http"' in labels)
    ]
    held = _values(metrics, "xlaserve_held_bytes")
    return found + [
        f"{labels} holds {value:g} bytes"
        for labels, value in held
        if value and _SPARE not in labels
    ]


def _settled(subject: Subject) -> str:
    """Return the metrics once all work has finished, or after a timeout."""
    end = time.monotonic() + _SETTLE_SECONDS
    while _left(metrics := _metrics(subject)) and time.monotonic() < end:
        time.sleep(0.2)
    return metrics


def _judge_clients(books: Mapping[str, Books], outcome: Outcome) -> None:
    turns = {kind: own.turns for kind, own in books.items()}
    outcome.note("turns of each kind", turns)
    outcome.note("requests", sum(sum(own.counts.values()) for own in books.values()))
    outcome.none("kinds that did nothing", [kind for kind, count in turns.items() if not count])
    for what in ("wrong", "lost"):
        found = [f"{kind}: {text}" for kind, own in books.items() for text in getattr(own, what)]
        outcome.none({"wrong": "wrong answers", "lost": "not answered"}[what], found)


def _judge_counts(books: Mapping[str, Books], before: str, after: str, outcome: Outcome) -> None:
    counted: Counts = read(after)
    outcome.none("counters that differ", differences(books, read(before), counted))
    unexpected = [
        f"{labels} {value:g}"
        for labels, value in _values(after, "xlaserve_refusals_total")
        if value and "Unexpected" in labels
    ]
    outcome.none("unexpected errors", unexpected)
    outcome.none("what has not ended", _left(after))


def _judge_growth(
    samples: Sequence[Sample], most_mib: float, kept_mib: float, outcome: Outcome
) -> None:
    resident = [float(sample.memory_bytes) for sample in samples]
    allowed = max(most_mib, 0.01 * level(resident) / MIB) + kept_mib
    outcome.note("memory, in the middle", f"{level(resident) / MIB:.1f} MiB")
    outcome.at_most("memory in the second half", round(growth(resident) / MIB, 2), allowed, " MiB")
    for name, unit, most in (
        ("files", "", 3),
        ("threads", "", 2),
        ("held_bytes", " MiB", most_mib),
    ):
        values = [float(getattr(sample, name)) for sample in samples]
        grown = growth(values) / (MIB if unit else 1)
        what = f"{name.replace('_', ' ')} in the second half"
        outcome.at_most(what, round(grown, 2), most, unit)
        outcome.note(f"{name.replace('_', ' ')}, in the middle", f"{level(values):g}")


def _judge_booked(
    samples: Sequence[Sample], records: Iterable[Mapping[str, Any]], outcome: Outcome
) -> None:
    """Compare each model's reservation at the end with the size that the log reports for it.

    Programs for further batch sizes are compiled after a load, so a model may reserve more until
    its record `background compilation finished`.
    """
    sizes: dict[str, list[int]] = {}
    complete = set[str]()
    for record in records:
        if record.get("event") in ("model loaded", "background compilation finished"):
            name = str(record["model"])
            if record["event"] == "background compilation finished" or name in sizes:
                complete.add(name)
            sizes.setdefault(name, []).append(int(record["size_bytes"]))
    last = samples[-max(1, len(samples) // 5) :]
    names = {name for sample in last for name in sample.booked}
    # During a reload both versions reserve memory for a moment.
    least = {name: min(sample.booked.get(name, 0) for sample in last) for name in names}
    more = {name for name in names if least[name] > max(sizes.get(name, [0]))}
    total = sum(sample.booked_bytes for sample in last) / len(last)
    outcome.note("booked bytes, at the end", f"{total / MIB:.1f} MiB")
    found = [f"{name}: {least[name]} of {max(sizes.get(name, [0]))}" for name in sorted(more)]
    is_judged = [text.partition(": ")[0] in complete for text in found]
    outcome.none(
        "models that book more than they have",
        [text for text, judged in zip(found, is_judged, strict=True) if judged],
    )
    outcome.note("models that were not complete", ", ".join(sorted(more - complete)) or "none")
    outcome.note("models that have booked more since the first sample", _grown(samples))


def _of_children(samples: Sequence[Sample]) -> dict[str, str]:
    """Return, by module, the most child processes at once and the memory of the largest."""
    found = {}
    for module in {module for sample in samples for module in sample.children}:
        held = [sample.children.get(module, ()) for sample in samples]
        most = max(max(one, default=0) for one in held)
        found[module] = f"at most {max(map(len, held))}, of {most / MIB:.0f} MiB"
    return found


def _grown(samples: Sequence[Sample]) -> dict[str, str]:
    """Return the first and the largest reservation of each model that grew."""
    found = {}
    for name, first in samples[0].booked.items() if samples else ():
        most = max(sample.booked.get(name, 0) for sample in samples)
        if first and most > first:
            found[name] = f"{first / MIB:.2f} to {most / MIB:.2f} MiB"
    return found


def _records(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _errors(log: Path) -> list[str]:
    """Return the errors in the log; each counts as a fault of the server."""
    found = _records(log)
    return [str(record)[:300] for record in found if record.get("level") in ("error", "critical")]
