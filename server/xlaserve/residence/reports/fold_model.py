"""Merges the readings of one model from several workers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from xlaserve.residence.failed_loads import NOT_LOADED
from xlaserve.residence.lifecycle import State
from xlaserve.residence.reports.fold_models import fold_reports, fold_states
from xlaserve.residence.reports.model_board import (
    GeneratorReading,
    LoadedReading,
    ModelReading,
    VersionReading,
)
from xlaserve.serving.observability.events import Cause, Origin
from xlaserve.serving.observability.failures import KEPT

_ABSENT = (State.UNAVAILABLE.public, NOT_LOADED)


def fold_model(answers: Mapping[str, ModelReading]) -> ModelReading:
    """Merge the readings of one model; `answers` maps worker names to readings.

    Counts and bytes are added up. A version is READY if it is READY in all workers.
    """
    readings = list(answers.values())
    numbers = {version.version for reading in readings for version in reading.versions}
    failures = sorted(
        chain.from_iterable(one.failures for one in readings), key=lambda one: -one.at_ns
    )
    return ModelReading(
        readings[0].name,
        any(one.is_known for one in readings),
        sum(one.in_progress for one in readings),
        tuple(sorted({name for one in readings for name in one.dependents})),
        tuple(_version(answers, number) for number in sorted(numbers, key=int)),
        tuple(failures[:KEPT]),
        next((one.reason for one in readings if one.reason), ""),
    )


def _version(answers: Mapping[str, ModelReading], number: str) -> VersionReading:
    found = {
        worker: version
        for worker, reading in answers.items()
        for version in reading.versions
        if version.version == number
    }
    states = {
        worker: (found[worker].state, found[worker].reason) if worker in found else _ABSENT
        for worker in answers
    }
    same = list(found.values())
    state, reason = fold_states(states)
    return replace(
        same[0],
        state=state,
        reason=reason,
        loads=sum(one.loads for one in same),
        load_failures=sum(one.load_failures for one in same),
        unloads=sum(one.unloads for one in same),
        load_seconds=max(one.load_seconds for one in same),
        origin=_origin([one.origin for one in same if one.origin is not None]),
        loaded=_loaded([one.loaded for one in same if one.loaded is not None]),
        report=fold_reports([one.report] for one in same)[0],
    )


def _origin(origins: Sequence[Origin]) -> Origin | None:
    """Return the origin of the load that a client or the server requested, or else the latest."""
    first = [one for one in origins if one.cause is not Cause.OTHER_WORKER]
    return max(first or origins, key=lambda one: one.at_ns, default=None)


def _loaded(loaded: Sequence[LoadedReading]) -> LoadedReading | None:
    if not loaded:
        return None
    return replace(
        loaded[0],
        memory=_added(one.memory for one in loaded),
        devices=_added(one.devices for one in loaded),
        pending=sum(one.pending for one in loaded),
        generator=_generator([one.generator for one in loaded if one.generator is not None]),
    )


def _generator(generators: Sequence[GeneratorReading]) -> GeneratorReading | None:
    if not generators:
        return None
    return replace(
        generators[0],
        slots=sum(one.slots for one in generators),
        running=sum(one.running for one in generators),
        positions=sum(one.positions for one in generators),
        positions_used=sum(one.positions_used for one in generators),
        prompt_tokens=sum(one.prompt_tokens for one in generators),
        output_tokens=sum(one.output_tokens for one in generators),
    )


def _added(sizes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for one in sizes:
        for name, size in one.items():
            total[name] = total.get(name, 0) + size
    return total
