import pytest
from support.honest_rows import HONEST
from support.rows import verdict_of

from xlaserve.row_proofs import Independence


@pytest.mark.parametrize("name", HONEST)
def test_rows_that_do_not_see_one_another_are_proved(name: str) -> None:
    verdict = verdict_of(*HONEST[name])

    assert str(verdict) == "proved"


def test_there_are_at_least_ninety() -> None:
    assert len(HONEST) >= 90


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cholesky", "inverse", "noise of a key for each", "fourier"])
def test_what_is_compiled_for_a_gpu_is_proved_too(name: str) -> None:
    """The rules know CUDA's library functions; nothing is executed here."""
    verdict = verdict_of(*HONEST[name], platforms=["cpu", "cuda"])

    assert verdict.independence == Independence.PROVED


@pytest.mark.parametrize("name", ["newton for each", "collatz", "loop in a loop of rows"])
def test_a_loop_whose_length_depends_on_rows_is_said_to(name: str) -> None:
    verdict = verdict_of(*HONEST[name])

    assert verdict.loops_follow_rows
    assert verdict.loops_follow_inputs


@pytest.mark.parametrize("name", ["lstm", "euler steps", "viterbi", "tree", "mlp"])
def test_a_loop_of_constant_length_follows_nothing(name: str) -> None:
    verdict = verdict_of(*HONEST[name])

    assert not verdict.loops_follow_rows
    assert not verdict.loops_follow_inputs
