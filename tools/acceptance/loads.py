"""L1, L2 and L3: repeated loading and unloading of models."""

# pyright: reportAttributeAccessIssue=false
# protobuf generates the classes of service_pb2 at import time, so type checkers do not see them.

import asyncio
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from acceptance.asking import SECONDS, floats, infer_message
from acceptance.figures import Outcome, level, slope
from acceptance.subjects import WIDTH, Subject, export_plus, serving, write_leaking_load

_ALLOWED = re.compile(r"(FAILED_PRECONDITION|UNAVAILABLE|NOT_FOUND): model 'plus'")
"""Statuses that races between loads and unloads may cause."""
_LOAD_SECONDS = 300.0
_MANY_CYCLES = 1000
"""With at least this many cycles, every pool has started all its threads before the half."""
_TAIL = 0.5
"""Fraction of the cycles, at the end, in which growth is measured."""


def _stub(channel: Any) -> Any:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


async def _load(stub: Any, name: str) -> None:
    await stub.RepositoryModelLoad(
        pb.RepositoryModelLoadRequest(model_name=name), timeout=_LOAD_SECONDS
    )


async def _unload(stub: Any, name: str) -> None:
    await stub.RepositoryModelUnload(
        pb.RepositoryModelUnloadRequest(model_name=name), timeout=_LOAD_SECONDS
    )


# --- L1: concurrent loads and unloads ----------------------------------------------------------


def races(folder: Path, *, clients: int = 32, rounds: int = 1024) -> Outcome:
    """Have clients load and unload one model at the same time."""
    export_plus(folder / "models", "plus", 1, rows=1)
    outcome = Outcome()
    with serving(folder) as subject:
        asyncio.run(_race(subject, clients, rounds, outcome))
        outcome.add("server", subject.is_running, "runs", holds=subject.is_running)
    return outcome


async def _race(subject: Subject, clients: int, rounds: int, outcome: Outcome) -> None:
    refusals: Counter[str] = Counter()

    async def client(stub: Any) -> None:
        for _ in range(rounds):
            for call in (_load, _unload):
                try:
                    await call(stub, "plus")
                except grpc.aio.AioRpcError as error:
                    refusals[f"{error.code().name}: {error.details()}"] += 1

    async with grpc.aio.insecure_channel(subject.grpc) as channel:
        stub = _stub(channel)
        await asyncio.gather(*(client(stub) for _ in range(clients)))
        outcome.note("loads and unloads", 2 * clients * rounds)
        unlisted = [text for text in refusals.elements() if not _ALLOWED.match(text)]
        outcome.note("refused, as races may be", sum(refusals.values()) - len(unlisted))
        outcome.none("refused otherwise", unlisted)
        await _load(stub, "plus")
        await _is_right(stub, outcome)
        live = await stub.ServerLive(pb.ServerLiveRequest(), timeout=SECONDS)
        ready = await stub.ServerReady(pb.ServerReadyRequest(), timeout=SECONDS)
        holds = live.live and ready.ready
        outcome.add("live and ready behind it", holds, "True", holds=holds)


async def _is_right(stub: Any, outcome: Outcome) -> None:
    sent = np.ones((1, WIDTH), np.float32)
    answer = await stub.ModelInfer(infer_message("plus", sent), timeout=SECONDS)
    right = bool(np.array_equal(floats(answer.raw_output_contents[0]), sent.ravel() + 1))
    outcome.add("an inference behind it", "right" if right else "wrong", "right", holds=right)


# --- L2: reloads under traffic -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Size of the run."""

    reloads: int
    requests: int
    clients: int


@dataclass(slots=True)
class _Traffic:
    """Requests during reloads."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Answers that mix versions or match none."""
    versions: Counter[str] = field(default_factory=Counter)
    reloaded: bool = False
    """Whether the last reload has finished."""


def reloads(
    folder: Path, *, count: int = 1000, requests: int = 100_000, clients: int = 16
) -> Outcome:
    """Reload a model alternately with two versions while clients send requests."""
    models = folder / "models"
    for version in ("1", "2"):
        export_plus(models, "plus", float(version), version)
    _choose(models, "1")
    outcome = Outcome()
    with serving(folder) as subject:
        asyncio.run(_reload(subject, models, _Wanted(count, requests, clients), outcome))
    return outcome


def _choose(models: Path, version: str) -> None:
    config = {"max_batch_size": 4, "version_policy": {"specific": {"versions": [int(version)]}}}
    written = models / "plus" / ".config"
    written.write_text(json.dumps(config))
    written.replace(models / "plus" / "config.json")


async def _reload(subject: Subject, models: Path, wanted: _Wanted, outcome: Outcome) -> None:
    count, requests = wanted.reloads, wanted.requests
    traffic, resident = _Traffic(), list[float]()

    async def client(stub: Any) -> None:
        value = 0
        while not traffic.reloaded or traffic.answered + len(traffic.failed) < requests:
            value = (value + 7) % 1000
            await _ask_whole(stub, traffic, value)

    async with grpc.aio.insecure_channel(subject.grpc) as channel:
        stub = _stub(channel)
        async with asyncio.TaskGroup() as group:
            for _ in range(wanted.clients):
                group.create_task(client(stub))
            for number in range(count):
                _choose(models, "12"[number % 2])
                await _load(stub, "plus")
                resident.append(subject.held_bytes())
            traffic.reloaded = True
    outcome.at_least("reloads", count, count)
    outcome.at_least("requests", traffic.answered + len(traffic.failed), requests)
    outcome.none("failed", traffic.failed)
    outcome.none("of no whole version", traffic.torn)
    outcome.at_least("versions that answered", len(traffic.versions), 2)
    settled = resident[min(100, len(resident) // 2) :]
    part = max(1, len(settled) // 10)
    grown = 100 * (level(settled[-part:]) / level(settled[:part]) - 1)
    outcome.at_most("memory after the first 100", round(grown, 2), 2, " %")


async def _ask_whole(stub: Any, traffic: _Traffic, value: int) -> None:
    sent = np.full((1, WIDTH), value, np.float32)
    try:
        answer = await stub.ModelInfer(infer_message("plus", sent), timeout=SECONDS)
    except grpc.aio.AioRpcError as error:
        traffic.failed.append(f"{error.code().name}: {error.details()}")
        return
    traffic.answered += 1
    traffic.versions[answer.model_version] += 1
    found = floats(answer.raw_output_contents[0])
    if not np.array_equal(found, np.full(WIDTH, value + int(answer.model_version), np.float32)):
        traffic.torn.append(f"{value} and version {answer.model_version}: {found}")


# --- L3: repeated loads and unloads ------------------------------------------------------------


def cycles(folder: Path, *, count: int = 2000, most_kib: float = 1, leaks: bool = False) -> Outcome:
    """Load and unload one model repeatedly. With `leaks` each load keeps 100 kB."""
    if leaks:
        write_leaking_load(folder / "models", "plus")
    else:
        export_plus(folder / "models", "plus", 1, rows=1)
    outcome = Outcome()
    with serving(folder) as subject:
        asyncio.run(_cycle(subject, count, most_kib, outcome))
    return outcome


async def _cycle(subject: Subject, count: int, most_kib: float, outcome: Outcome) -> None:
    resident, files, threads = list[float](), 0, 0
    async with grpc.aio.insecure_channel(subject.grpc) as channel:
        stub = _stub(channel)
        for number in range(count):
            await _load(stub, "plus")
            await _unload(stub, "plus")
            resident.append(subject.held_bytes())
            if number == count // 2:
                files, threads = subject.open_files(), subject.threads()
    tail = resident[int(len(resident) * (1 - _TAIL)) :]
    outcome.note("cycles", count)
    per_cycle = growth_per_cycle(tail)
    outcome.at_most("memory per cycle", round(per_cycle / 1024, 3), most_kib, " KiB")
    outcome.at_most("open files", subject.open_files() - files, 0)
    # A pool starts another of its few threads when none is idle, which in short runs may come late.
    late = 0 if count >= _MANY_CYCLES else 2
    outcome.at_most("threads", subject.threads() - threads, late)


def growth_per_cycle(resident: list[float]) -> float:
    """Return the memory growth in bytes per cycle: the smaller of the slope of a line through all
    samples and the difference between the medians of both ends, as one allocator step tilts the
    line.
    """
    part = max(1, len(resident) // 5)
    between = max(1, len(resident) - part)
    by_ends = (level(resident[-part:]) - level(resident[:part])) / between
    return min(slope(resident), by_ends)
