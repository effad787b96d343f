"""Chooses one of several requests without starving any."""

from collections.abc import Callable, Sequence

from xlaserve.generation.running import Running

MOST_PASSED = 8
"""Times that a request may be passed over before it goes first."""


def choose(found: Sequence[Running], cost: Callable[[Running], int]) -> Running:
    """Return the one of the best level and the least cost, or one that was passed over too often.

    Of n requests each is chosen within MOST_PASSED + n choices: among those that were passed over
    too often the one that was most often goes first, and no newcomer can be ahead of it.
    """
    late = [running for running in found if running.passed >= MOST_PASSED]
    if late:
        chosen = max(late, key=lambda running: running.passed)
    else:
        chosen = min(found, key=lambda running: (running.level, cost(running)))
    for running in found:
        running.passed += 1
    chosen.passed = 0
    return chosen
