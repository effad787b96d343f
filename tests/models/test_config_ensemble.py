import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlaserve.model_config.config import EnsembleStep
from xlaserve.model_config.ensemble import in_order
from xlaserve.model_config.schema import BadConfig


def _step(model: str, takes: str, makes: str) -> EnsembleStep:
    return EnsembleStep(
        model,
        "",
        {f"in{index}": tensor for index, tensor in enumerate(takes.split())},
        {f"out{index}": tensor for index, tensor in enumerate(makes.split())},
    )


A, B, C = _step("a", "x", "t"), _step("b", "t x", "u"), _step("c", "t", "y")


def _refused(steps: list[EnsembleStep], inputs: list[str], outputs: list[str]) -> str:
    with pytest.raises(BadConfig) as caught:
        in_order(steps, inputs, outputs)
    return str(caught.value)


def test_order_that_works_stays_as_written() -> None:
    assert (A, B, C) == in_order([A, B, C], ["x"], ["u", "y"])
    assert (A, C, B) == in_order([A, C, B], ["x"], ["u", "y"])


def test_step_written_before_those_it_needs_moves_behind_them() -> None:
    assert (A, C, B) == in_order([C, A, B], ["x"], ["y"])


@given(st.permutations(range(6)))
def test_any_order_of_a_chain_is_put_right(order: list[int]) -> None:
    chain = [_step(str(index), f"t{index}", f"t{index + 1}") for index in range(6)]

    assert tuple(chain) == in_order([chain[index] for index in order], ["t0"], ["t6"])


def test_one_model_may_be_several_steps() -> None:
    steps = [_step("a", "x", "t"), _step("a", "t", "y")]

    assert tuple(steps) == in_order(steps, ["x"], ["y"])


def test_tensor_that_nothing_makes_is_refused() -> None:
    expected = 'tensor "t" of step 0 ("b") is neither an input nor an output of a step'

    assert expected == _refused([B], ["x"], ["u"])


def test_output_that_nothing_makes_is_refused() -> None:
    expected = 'tensor "z" of the ensemble\'s output is neither an input nor an output of a step'

    assert expected == _refused([A], ["x"], ["z"])


def test_output_that_is_an_input_is_refused() -> None:
    assert 'tensor "x" is both an input and an output' == _refused([A], ["x"], ["x"])


def test_tensor_made_by_two_steps_is_refused() -> None:
    expected = 'tensor "t" has two sources: step 0 ("a") and step 1 ("d")'

    assert expected == _refused([A, _step("d", "x", "t")], ["x"], ["t"])


def test_tensor_made_twice_by_one_step_is_refused() -> None:
    assert "has two sources: step 0" in _refused([_step("d", "x", "t t")], ["x"], ["t"])


def test_input_made_by_a_step_is_refused() -> None:
    expected = 'tensor "x" has two sources: an input and step 0 ("d")'

    assert expected == _refused([_step("d", "y", "x")], ["x", "y"], ["x"])


def test_steps_that_wait_for_one_another_are_refused() -> None:
    steps = [_step("a", "x t", "u"), _step("b", "u", "t")]

    assert "the steps form a cycle: step" in _refused(steps, ["x"], ["u"])


def test_step_that_waits_for_itself_is_refused() -> None:
    assert "the steps form a cycle" in _refused([_step("a", "t", "t")], ["x"], ["t"])
