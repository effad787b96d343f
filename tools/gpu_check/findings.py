"""The findings of a check in words and numbers, each with a verdict."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from gpu_check.device import Device, Options


class Verdict(StrEnum):
    """Verdict on a finding."""

    PASSED = "passed"
    FAILED = "failed"
    MEASURED = "measured"
    """A figure for information, without a limit."""
    UNKNOWN = "unknown"
    """No verdict, because this device lacks what the check needs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the table."""

    check: str
    subject: str
    """Usually a model."""
    verdict: Verdict
    said: str
    values: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))


Check: TypeAlias = Callable[[Device, Options], Iterator[Finding]]


def judged(check: str, subject: str, passed: bool, said: str, **values: object) -> Finding:
    """Return a finding that passed or failed."""
    return Finding(check, subject, Verdict.PASSED if passed else Verdict.FAILED, said, values)


def measured(check: str, subject: str, said: str, **values: object) -> Finding:
    """Return a figure."""
    return Finding(check, subject, Verdict.MEASURED, said, values)


def unknown(check: str, subject: str, said: str) -> Finding:
    """Return a finding about something that this device cannot determine."""
    return Finding(check, subject, Verdict.UNKNOWN, said)
