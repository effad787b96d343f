"""Request counts of one kind of clients, compared with the server's counters."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

_SAMPLE = re.compile(r"^(?P<name>\w+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.M)
_MODEL = re.compile(r'(?:^|,)model="(?P<model>[^"]*)"')

Counts = Counter[tuple[str, "Fate"]]
"""Counts by model and outcome."""


class Fate(StrEnum):
    """Outcome of an inference request, a load or an unload."""

    ANSWERED = "answered"
    FAILED = "failed"
    UNSURE = "answered or failed"
    """The outcome is unknown: the client disconnected or timed out."""
    LOADED = "loaded"
    NOT_LOADED = "not loaded"
    UNLOADED = "unloaded"


COUNTERS: Mapping[Fate, str] = MappingProxyType(
    {
        Fate.ANSWERED: "nv_inference_request_success",
        Fate.FAILED: "nv_inference_request_failure",
        Fate.LOADED: "xlaserve_model_loads_total",
        Fate.NOT_LOADED: "xlaserve_model_load_failures_total",
        Fate.UNLOADED: "xlaserve_model_unloads_total",
    }
)
"""The server's counter for each outcome; there is none for UNSURE."""


@dataclass(slots=True)
class Books:
    """All observations of the clients of one kind."""

    models: tuple[str, ...]
    turns: int = 0
    counts: Counts = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Turns without an answer, or with an unexpected error."""
    known: dict[str, Any] = field(default_factory=dict)
    """The first answer to each question whose answer must never change."""

    def note(self, model: str, fate: Fate, times: int = 1) -> None:
        """Add to the count of an outcome for a model."""
        assert model in self.models, model
        self.counts[model, fate] += times

    def expect(self, holds: bool, text: str) -> None:
        """Record a wrong answer unless `holds`."""
        if not holds:
            self.wrong.append(text[:300])

    def same(self, question: str, answer: Any) -> None:
        """Record a wrong answer if it differs from the first answer to this question."""
        first = self.known.setdefault(question, answer)
        self.expect(first == answer, f"{question} was {first}, then {answer}")


def read(metrics: str) -> Counts:
    """Return the server's counters by model, summed over versions and reasons."""
    fates = {counter: fate for fate, counter in COUNTERS.items()}
    found: Counts = Counter()
    for sample in _SAMPLE.finditer(metrics):
        fate = fates.get(sample["name"])
        model = _MODEL.search(sample["labels"])
        if fate is not None and model is not None:
            found[model["model"], fate] += int(float(sample["value"]))
    return found


def differences(kinds: Mapping[str, Books], before: Counts, after: Counts) -> list[str]:
    """Describe every model and outcome where the counts of clients and server differ."""
    return [text for kind, books in kinds.items() for text in _of(kind, books, before, after)]


def _of(kind: str, books: Books, before: Counts, after: Counts) -> Iterable[str]:
    for model in books.models:
        unsure = books.counts[model, Fate.UNSURE]
        told = {fate: after[model, fate] - before[model, fate] for fate in COUNTERS}
        for fate, count in told.items():
            own = books.counts[model, fate]
            most = own + unsure if fate in (Fate.ANSWERED, Fate.FAILED) else own
            if not own <= count <= most:
                yield f"{kind}: {model}: {count} {fate}, its clients counted {_span(own, most)}"
        both = told[Fate.ANSWERED] + told[Fate.FAILED]
        most = sum(books.counts[model, fate] for fate in (Fate.ANSWERED, Fate.FAILED)) + unsure
        if both > most:
            yield f"{kind}: {model}: {both} requests, its clients counted {most}"


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
