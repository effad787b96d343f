"""Walks over a program once, computing the abstract value of every value."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from xlaserve.row_proofs import invariants
from xlaserve.row_proofs.domain import Value, blocked
from xlaserve.row_proofs.findings import Finding, Problem, Unfollowed
from xlaserve.row_proofs.program import Operation, Region

MAX_STEPS = 400_000
"""Maximum number of operations visited; operations in loops count once per round."""

_NOT_OF_ONE_RULE = (Unfollowed, MemoryError, RecursionError)


@dataclass(frozen=True, slots=True)
class Rule:
    """How an operation transforms abstract values."""

    compute: Callable[[Operation, Sequence[Value], Walker], Sequence[Value]]
    """Returns the abstract values of the results; raises Mixes or NoRule."""
    takes_unknown: bool = False
    """Whether `compute` is called with blocked operands; otherwise these block the results."""
    grows: frozenset[str] = frozenset()
    """Attributes that `compute` reads as sizes, which may depend on the batch size. The operation
    is rejected if any other attribute does."""
    ignored: Callable[[int], Collection[int]] = lambda count: ()
    """Returns the positions of the operands that results may not depend on, given the number of
    operands."""
    settle: Callable[[Operation, Sequence[Value], Walker], Sequence[Value]] | None = None
    """Returns more precise results found by another method; may return them unchanged."""


Rules: TypeAlias = Mapping[str, Rule]


class Walker:
    """One walk over a program, with the abstract values found so far."""

    def __init__(self, rules: Rules, deadline: float) -> None:
        self.loops_follow_rows = False
        """Whether the trip count of some visited loop depends on rows."""
        self.loops_follow_inputs = False
        """Whether the trip count of some visited loop is not known to be constant."""
        self._rules = rules
        self._deadline = deadline
        self._steps = 0
        self._values: dict[int, Value] = {}
        self._made: dict[int, Operation] = {}
        self._same: dict[int, int] = {}
        self.noted: dict[object, object] = {}
        """A cache for rules, cleared when the values of a loop's arguments change."""

    def value(self, number: int) -> Value:
        """Return the abstract value of a value that was visited."""
        return self._values[number]

    def known(self, number: int) -> Value | None:
        """Return the abstract value of a value, or None if it was not visited yet."""
        return self._values.get(number)

    def same_as(self, number: int) -> int:
        """Return the value that a loop-invariant argument equals, or else the number itself."""
        while number in self._same:
            number = self._same[number]
        return number

    def made_by(self, number: int) -> Operation | None:
        """Return the operation that produces a value; None for an argument."""
        return self._made.get(number)

    def region(self, region: Region, arguments: Sequence[Value]) -> list[Value]:
        """Walk over a region and return the abstract values of its results."""
        if not self._values.keys().isdisjoint(region.arguments):
            self.noted.clear()
        self._values.update(zip(region.arguments, arguments, strict=True))
        for operation in region.operations:
            self._operation(operation)
        return [self._values[number] for number in region.returned]

    def _operation(self, operation: Operation) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise Unfollowed(f"takes more than {MAX_STEPS} steps to analyse")
        if not self._steps & 255 and time.thread_time() > self._deadline:
            raise Unfollowed("takes too long to analyse")
        operands = [self._values[number] for number in operation.operands]
        self._made.update(dict.fromkeys(operation.results, operation))
        if operation.name == "stablehlo.while":
            self._same.update(_kept(operation))
        results = self._computed(operation, operands)
        self._values.update(zip(operation.results, results, strict=True))

    def _computed(self, operation: Operation, operands: Sequence[Value]) -> Sequence[Value]:
        rule = self._rules.get(operation.name)
        if rule is None:
            return self._stopped(operation, mixed=False, reason="has no rule")
        reason = invariants.unread(operation, rule.grows)
        if reason:
            return self._stopped(operation, mixed=False, reason=reason)
        results = self._by_rule(rule, operation, operands)
        if rule.settle is None:
            return results
        # `settle` does not use the abstract values of the operands, so the check gets none.
        try:
            settled = rule.settle(operation, results, self)
        except _NOT_OF_ONE_RULE:
            raise
        # An error for an unexpected form of the operation only prevents more precise results.
        except Exception:
            return results
        return results if invariants.broken(operation, (), settled) else settled

    def _by_rule(
        self, rule: Rule, operation: Operation, operands: Sequence[Value]
    ) -> Sequence[Value]:
        try:
            if not rule.takes_unknown and any(one.blocked is not None for one in operands):
                return [blocked(operands)] * len(operation.results)
            results = rule.compute(operation, operands, self)
        except Problem as problem:
            return self._stopped(operation, mixed=problem.mixed, reason=str(problem))
        except _NOT_OF_ONE_RULE:
            raise
        # An unexpected form of the operation blocks its results, but not other outputs.
        except Exception as error:
            reason = f"has a form unknown to its rule ({type(error).__name__})"
            return self._stopped(operation, mixed=False, reason=reason)
        reason = invariants.broken(operation, operands, results, rule.ignored(len(operands)))
        return self._stopped(operation, mixed=False, reason=reason) if reason else results

    @staticmethod
    def _stopped(operation: Operation, *, mixed: bool, reason: str) -> list[Value]:
        finding = Finding(mixed, operation.name, reason, operation.location())
        return [Value((), finding)] * len(operation.results)


def _kept(loop: Operation) -> Iterator[tuple[int, int]]:
    """Yield each loop-invariant argument with the value that it equals."""
    condition, body = loop.regions
    for number, operand in enumerate(loop.operands):
        if body.returned[number] == body.arguments[number]:
            yield condition.arguments[number], operand
            yield body.arguments[number], operand
