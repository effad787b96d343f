"""The generator parameter that selects the syntax of tool calls."""

import pytest
from structlog.testing import capture_logs

from xlaserve.errors import InvalidModel
from xlaserve.generation.tools import family
from xlaserve.model_config.config import ModelConfig


def config(value: str) -> ModelConfig:
    return ModelConfig(parameters={"tool_calls": value})


def test_a_family_that_is_none_is_refused() -> None:
    expected = "'tool_calls': expected one of hermes, llama, none, got 'pythonic'"
    with pytest.raises(InvalidModel, match=expected):
        family(config("pythonic"), None, "story")


def test_a_family_without_a_template_is_refused() -> None:
    """Nothing would tell the model of its tools."""
    with pytest.raises(InvalidModel, match="expected 'none' for a model without a chat template"):
        family(config("hermes"), None, "story")


@pytest.mark.parametrize("config", [config("none"), ModelConfig()])
def test_a_model_without_text_writes_no_calls_and_no_line(config: ModelConfig) -> None:
    with capture_logs() as logged:
        found = family(config, None, "story")

    assert not found
    assert [] == logged
