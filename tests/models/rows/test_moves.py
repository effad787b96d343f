"""Random programs that rearrange elements: every proof is confirmed by execution."""

import jax.numpy as jnp
import pytest
from support.row_moves import INPUTS, Moves, leaks
from support.rows import exported, findings_of

DEFAULT = range(20)
SLOW = range(1000, 1300)
LARGE = range(10_000, 15_000)


def judged(seeds: range) -> tuple[int, int]:
    """Return the numbers of proved and unproved outputs; fails if a proof is wrong."""
    proved = refused = 0
    for seed in seeds:
        program = Moves(seed)
        if not program.outputs:
            continue
        try:
            artifact = exported(lambda *x, of=program: of(jnp, *x), INPUTS)
        # JAX cannot express some programs for a symbolic batch, or would broadcast differently.
        except Exception:
            continue
        for finding, leak in zip(findings_of(artifact), leaks(program, seed), strict=True):
            assert finding is not None or not leak, f"{seed}: {leak}; {program.taken}"
            proved += finding is None
            refused += finding is not None
    return proved, refused


def test_what_is_proved_of_moves_holds() -> None:
    proved, refused = judged(DEFAULT)

    assert proved >= 5
    assert refused >= 5


@pytest.mark.slow
def test_what_is_proved_of_hundreds_of_moves_holds() -> None:
    proved, refused = judged(SLOW)

    assert proved >= 200
    assert refused >= 200


@pytest.mark.large
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", LARGE[::500])
def test_what_is_proved_of_five_hundred_moves_holds(first: int) -> None:
    proved, refused = judged(range(first, first + 500))

    assert proved >= 200
    assert refused >= 200
