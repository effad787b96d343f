"""Runs a proved computation once, as a second check of the row proof.

A computation without loops always terminates: the server executes its programs with the load's
parameters. A computation with loops is first executed in another process, on zeros like a warm-up,
and only then in the server.
"""

# Some of the jax functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np
import structlog

from xlaserve.artifact import shapes
from xlaserve.artifact.computation import text_of
from xlaserve.errors import InvalidModel
from xlaserve.row_proofs import neighbours, tolerances
from xlaserve.row_proofs.neighbours import Difference
from xlaserve.runtime.programs import cache_key, trials
from xlaserve.runtime.programs.compilation import Compilation, flags
from xlaserve.runtime.programs.compilation_cache import Entry, name_of
from xlaserve.runtime.programs.program_table import Copy, Program
from xlaserve.runtime.programs.shared_programs import Lease
from xlaserve.runtime.programs.trials import Outcome, Subject
from xlaserve.tensors import Shape, Tensor

MAX_SECONDS = 2.0
"""Maximum time that these executions add to a load; larger batches that exceed it are skipped."""

_BATCH_RUNS = 2
"""Executions per batch size: one with padding, one with other rows."""

_AS_PROVED = "requests are batched as proved"
_EXECUTED_HERE = "the server executes it, limited only by load_seconds"

_log = structlog.get_logger("proof")


class ContradictionError(Exception):
    """A trial contradicts the row proof: a row depends on other rows."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


@dataclass(frozen=True, slots=True)
class Net:
    """Executes a load's programs on trial, before the load relies on a proof."""

    subject: Subject
    lease: Lease
    copy: Copy
    compilation: Compilation
    is_proved: bool
    """Whether requests are batched because of a proof."""
    check_cancelled: Callable[[], None]

    def check_ends(self, first: Sequence[Shape]) -> None:
        """Execute a computation with loops in another process, on inputs of these shapes.

        Raises InvalidModel if it does not terminate, and ContradictionError.
        """
        here = self.compilation.tries_here or self.copy.site.platform != "cpu"
        if here or not self.subject.has_loops or not (first or self.is_proved):
            return

        def find() -> Outcome:
            return trials.tried(
                self.subject,
                self.compilation.processes,
                seconds=self.compilation.trial_seconds,
                is_thorough=False,
                is_compared=self.is_proved,
                first=first,
                check_cancelled=self.check_cancelled,
            )

        outcome = self.lease.fact(self._key, lambda: self._remembered(find))
        if outcome.never_began:
            raise InvalidModel(
                f"a loop of the model did not end: {outcome.unfinished}; raise trial_seconds if it"
                " is only slow"
            )
        self._judge(outcome)

    def check(self, programs: Sequence[Program]) -> None:
        """Execute programs without loops; raise ContradictionError if they contradict the proof."""
        if self.is_proved and not self.subject.has_loops and programs:
            self._judge(self.lease.fact(self._key, lambda: self._executed(programs)))

    @property
    def _key(self) -> tuple[object, ...]:
        """Return the key under which the lease remembers the outcome."""
        inputs = tuple((spec.name, spec.shape) for spec in self.subject.inputs)
        outputs = tuple(spec.name for spec in self.subject.outputs)
        return "trial", self.is_proved, inputs, outputs, self.copy.site.platform

    def _judge(self, outcome: Outcome) -> None:
        if outcome.difference is not None:
            raise ContradictionError(outcome.difference)
        if outcome.unfinished:
            _log.warning(
                "model trial incomplete",
                model=self.subject.model,
                reason=outcome.unfinished,
                consequence=_AS_PROVED if self.is_proved else _EXECUTED_HERE,
            )

    def _executed(self, programs: Sequence[Program]) -> Outcome:
        batches = [program for program in programs if program.rows >= neighbours.SUBJECTS]
        if all(program.seconds == inf for program in batches):
            return Outcome()  # without a warm-up, this process does not serve the model
        chosen = within(programs, MAX_SECONDS)
        if not chosen:
            return Outcome(unfinished=f"its executions take more than {MAX_SECONDS:g} seconds")
        by_rows = {program.rows: program for program in chosen}

        def run(tensors: Sequence[Tensor]) -> list[Tensor]:
            self.check_cancelled()
            rows = len(tensors[0])
            program = by_rows.get(rows, chosen[0])
            padded = [shapes.padded(tensor, program.rows) for tensor in tensors]
            outputs = program.call(self.copy.leaves, list(padded))
            return [np.asarray(output)[:rows] for output in outputs]

        sizes = [rows for rows in by_rows if rows >= neighbours.SUBJECTS]
        inputs, outputs = self.subject.inputs, self.subject.outputs
        return Outcome(
            neighbours.find_contradiction(run, inputs, outputs, sizes=sizes, least=self._tolerance)
        )

    def _tolerance(self) -> float:
        return tolerances.of_module(text_of(self.subject.exported.mlir_module_serialized))

    # --- outcomes of earlier runs ---

    def _remembered(self, find: Callable[[], Outcome]) -> Outcome:
        """Return a trial's outcome from the compilation cache, or run `find` and store it."""
        cache, site = self.compilation.cache, self.copy.site
        if cache is None:
            return find()
        key = {"computation": self.lease.key, "trial": repr(self._key)}
        environment = cache_key.environment(site, {}, flags())
        target = cache_key.target_of(site.platform, str(site.devices[0].device_kind))
        name = name_of({**key, **environment})
        there = cache.read(target, name)
        if isinstance(there, Entry) and (there.program, there.environment) == (key, environment):
            return msgspec.msgpack.decode(there.executable, type=Outcome)
        outcome = find()
        if not outcome.unfinished:
            cache.write(target, name, Entry(key, environment, msgspec.msgpack.encode(outcome)))
        return outcome


def within(programs: Sequence[Program], seconds: float) -> list[Program]:
    """Choose programs for a trial: the smallest, the largest that fits, and the next smallest.

    Returns nothing if there is not enough time for any of them. Programs that the warm-up did not
    measure are not executed.
    """
    smallest, large = programs[0], [one for one in programs if one.rows >= neighbours.SUBJECTS]
    left = seconds - neighbours.SUBJECTS * smallest.seconds
    found: list[Program] = []
    for candidates in (reversed(large), large):
        for program in candidates:
            cost = _BATCH_RUNS * program.seconds
            if program not in found and cost <= left < inf:
                found.append(program)
                left -= cost
                break
    if not found:
        return []
    chosen = found if smallest in found else [smallest, *found]
    return sorted(chosen, key=lambda program: program.rows)
