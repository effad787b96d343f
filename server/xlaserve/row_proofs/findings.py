"""Reasons why a proof of row independence fails."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The operation at which the proof fails, and why."""

    mixed: bool
    """Whether the operation seems to combine rows. Such findings are reported before missing rules,
    but do not prove that an answer changes."""
    operation: str
    reason: str
    location: str = ""


class Problem(Exception):
    """Raised by a rule whose operation does not keep rows apart; the message is a clause."""

    mixed = False


class Mixes(Problem):
    """The operation combines a row with others, with its index, or with the batch size."""

    mixed = True


class NoRule(Problem):
    """No rule covers the operation in this form."""


class Unfollowed(Exception):
    """The whole computation cannot be analysed; the message is a clause."""
