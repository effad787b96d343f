"""Why a value is not proved to be of one row."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The operation after which a property was lost, and why."""

    mixed: bool
    """Whether rows come together there, as far as they were followed; told before what has no rule.
    It is no proof that an answer changes."""
    operation: str
    reason: str
    location: str = ""


class Problem(Exception):
    """The error of a rule whose operation does not keep rows apart; takes a clause."""

    mixed = False


class Mixes(Problem):
    """The operation puts a row together with others, with its place or the size of the batch."""

    mixed = True


class NoRule(Problem):
    """Nothing is known of the operation in this form."""


class Unfollowed(Exception):
    """The whole computation cannot be analysed; takes a clause."""
