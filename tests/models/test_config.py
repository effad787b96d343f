import pytest

from xlaserve.errors import InvalidModel
from xlaserve.model_config.config import EnsembleStep, ModelConfig, VersionPolicy


def test_default_policy_serves_the_latest_version() -> None:
    assert (7,) == VersionPolicy().select([3, 7, 1])


def test_latest_serves_so_many_in_ascending_order() -> None:
    assert (3, 7) == VersionPolicy(latest=2).select([7, 1, 3])


def test_latest_serves_all_where_there_are_fewer() -> None:
    assert (1, 3) == VersionPolicy(latest=4_294_967_295).select([3, 1])


def test_no_limit_serves_all() -> None:
    assert (1, 2, 3) == VersionPolicy(latest=None).select([2, 3, 1])


def test_specific_serves_only_what_exists_of_it() -> None:
    assert (2, 9) == VersionPolicy(latest=None, specific=(9, 2, 5)).select([1, 2, 9])


@pytest.mark.parametrize("name", ["", "digits"])
def test_name_may_be_left_out_or_be_that_of_the_directory(name: str) -> None:
    ModelConfig(name=name).check_name("digits")


def test_name_other_than_the_directory_is_refused() -> None:
    with pytest.raises(InvalidModel, match="expected the name of its directory, 'b', got 'a'"):
        ModelConfig(name="a").check_name("b")


def test_ensemble_may_not_have_itself_as_a_step() -> None:
    step = EnsembleStep("loop", "", {"x": "x"}, {"y": "y"})

    with pytest.raises(InvalidModel, match="ensemble 'loop' is a step of itself"):
        ModelConfig(steps=(step,)).check_name("loop")


def test_model_with_steps_is_an_ensemble() -> None:
    step = EnsembleStep("m", "", {"x": "x"}, {"y": "y"})

    assert ModelConfig(steps=(step,)).is_ensemble
    assert not ModelConfig().is_ensemble
