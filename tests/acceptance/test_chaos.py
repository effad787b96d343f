"""Chaos findings: only requests in flight at a SIGKILL may remain unanswered."""

from typing import Any, cast

import pytest

from acceptance import chaos
from acceptance.bystanders import Sight
from acceptance.figures import Outcome

DOWN, UP = 100.0, 105.0

FAILED = {
    "in flight at the SIGKILL": ((99.0, 100.1), True),
    "while the server was down": ((101.0, 101.1), True),
    "at once behind the start": ((105.5, 105.6), True),
    "before the SIGKILL": ((98.0, 99.9), False),
    "long behind the start": ((107.0, 107.1), False),
}


def judged(sight: Sight, others: Sight | None = None, **changes: Any) -> Outcome:
    stage, outcome = chaos._Stage(cast(Any, None), cast(Any, None), cast(Any, None)), Outcome()
    stage.outages.append((DOWN, UP))
    for name, value in changes.items():
        setattr(stage, name, value)
    chaos._judge(stage, (sight, others or Sight()), (50.0, 200.0), outcome, timed=True)
    return outcome


@pytest.mark.parametrize("when", FAILED)
def test_a_request_is_lost_unless_the_server_was_killed_under_it(when: str) -> None:
    (began, ended), is_excused = FAILED[when]
    outcome = judged(Sight(asked=1, failed=[(began, ended, "gRPC FP32: UNAVAILABLE")]))

    assert ([] if is_excused else ["lost otherwise"]) == outcome.failing


def test_a_wrong_answer_is_never_excused() -> None:
    assert ["wrong answers"] == judged(Sight(asked=1, wrong=["plus of 1 was 3"])).failing


def test_an_end_that_nobody_expects_is_found() -> None:
    outcome = judged(Sight(asked=1), unexpected=["load: INTERNAL"])

    assert ["unexpected ends of loads and others"] == outcome.failing


def test_latencies_are_compared_with_those_beside_but_not_those_of_a_start() -> None:
    """Earlier latencies do not count: the machine's load was different."""
    others = Sight(latencies=[(150.0 + at, 0.01) for at in range(30)])
    before, starting = [(10.0, 9.0)], [(104.0, 5.0)]
    fine = [(150.0 + at, 0.03) for at in range(30)]
    slow = [(150.0 + at, 0.04) for at in range(30)]

    assert judged(Sight(latencies=before + starting + fine), others).holds
    failing = judged(Sight(latencies=before + starting + slow), others).failing
    assert ["p99, in times of a server without chaos"] == failing
