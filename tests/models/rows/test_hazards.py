from collections.abc import Callable

import jax
import pytest
from support.row_hazards import HAZARDS
from support.rows import verdict_of

from xlaserve.row_proofs import Independence


@pytest.mark.parametrize("name", HAZARDS)
def test_no_hazard_is_proved(name: str) -> None:
    fn, inputs, operation = HAZARDS[name]

    verdict = verdict_of(fn, inputs)

    assert verdict.independence != Independence.PROVED
    if operation is not None:
        assert (verdict.independence, verdict.operation) == (Independence.UNKNOWN, operation)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: jax.lax.map(lambda row: row - row.max(), x),
        lambda x: jax.lax.approx_max_k(x, 2),
        lambda x: x.reshape(4, -1).reshape(-1, 4),
    ],
    ids=["map", "approx_max_k", "reshape"],
)
def test_what_is_harmless_and_not_followed_is_unknown(model: Callable[..., object]) -> None:
    """Unlike a refutation, the verdict does not override the author's declaration."""
    verdict = verdict_of(model, [((4,), "float32")])

    assert verdict.independence == Independence.UNKNOWN


def test_there_are_at_least_sixty() -> None:
    assert len(HAZARDS) >= 60


def test_the_line_that_mixes_rows_is_named() -> None:
    verdict = verdict_of(*HAZARDS["batch norm in training"][:2])

    assert verdict.location.startswith("row_hazards.py:")
    assert verdict.output == "y0"
