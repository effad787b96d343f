"""Request parameters: invalid ones are refused, and those without effect are logged."""

from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from xlaserve.client import request as client_request
from xlaserve.errors import InvalidParameter, InvalidTensor
from xlaserve.model_config.fields import Effect
from xlaserve.serving.inference import InferInput, InferRequest, RequestedOutput
from xlaserve.serving.parameters import (
    INPUT,
    MAX_NAMED,
    OUTPUT,
    REQUEST,
    NamedParameters,
    check_request,
    check_tensor,
)
from xlaserve.tensors import DATATYPES

COUNTS = (-1, -(2**63), 1.0, "1", True)
BOOLEANS = (0, 1, "true", 1.0)

WRONG: dict[str, tuple[Any, ...]] = {
    "sequence_id": (-1, 1.5, True),
    "sequence_start": BOOLEANS,
    "sequence_end": BOOLEANS,
    "priority": COUNTS,
    "timeout": COUNTS,
    "triton_enable_empty_final_response": BOOLEANS,
    "binary_data_output": BOOLEANS,
}
RIGHT: dict[str, tuple[Any, ...]] = {
    "sequence_id": (0, 7, 2**64 - 1, "", "a"),
    "sequence_start": (True, False),
    "sequence_end": (True, False),
    "priority": (0, 2**64 - 1),
    "timeout": (0, 5),
    "triton_enable_empty_final_response": (True, False),
    "binary_data_output": (True, False),
    "own": (True, -1, 1.5, "x"),
}
WRONG_OF_TENSORS: list[tuple[Any, str, Any]] = [
    (INPUT, "shared_memory_region", 1),
    (INPUT, "shared_memory_byte_size", -1),
    (INPUT, "binary_data_size", "8"),
    (OUTPUT, "shared_memory_offset", -1),
    (OUTPUT, "binary_data", 1),
    (OUTPUT, "classification", -1),
    (OUTPUT, "classification", "1"),
]


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_a_value_that_a_parameter_cannot_have_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        check_request({name: value})

    assert f"parameter '{name}': expected {REQUEST[name].kind.expected}, got {value!r}" == str(
        caught.value
    )
    assert not NamedParameters().are_ordinary({name: value})


def test_every_row_has_wrong_values_above() -> None:
    assert set(WRONG) == set(REQUEST)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in RIGHT.items() for v in vs])
def test_a_value_that_a_parameter_can_have_is_none_of_our_business(name: str, value: Any) -> None:
    check_request({name: value})


@pytest.mark.parametrize(("table", "name", "value"), WRONG_OF_TENSORS)
def test_a_value_that_a_parameter_of_a_tensor_cannot_have_is_refused(
    table: Any, name: str, value: Any
) -> None:
    with pytest.raises(InvalidTensor, match=f"'x': expected parameter '{name}' to be .*, got "):
        check_tensor("m", "input", "x", table, {name: value})


def test_a_classification_into_no_classes_asks_for_none() -> None:
    check_tensor("m", "output", "y", OUTPUT, {"classification": 0})


@pytest.mark.parametrize("name", ["triton_", "triton_secret", "triton_" + "x" * 1000])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        check_request({name: 1})

    assert len(str(caught.value)) < 300
    assert not NamedParameters().are_ordinary({name: 1})


def ask(
    of_input: dict[str, Any] | None = None, of_output: dict[str, Any] | None = None, **own: Any
) -> InferRequest:
    data = np.zeros((1, 2), np.float32)
    return InferRequest(
        "m",
        inputs=(InferInput("x", DATATYPES["FP32"], data, of_input or {}),),
        outputs=(RequestedOutput("y", of_output or {}),),
        parameters=own,
    )


def test_what_has_no_effect_is_named_once() -> None:
    named = NamedParameters()
    everything = ask({"mine": 1}, {"yours": 2, "binary_data": True}, priority=1, ours=3)
    with capture_logs() as lines:
        before = named.are_ordinary(everything.parameters)
        for _ in range(3):
            named.note(everything)
        named.note(ask(priority=2, binary_data_output=True))

    assert [["priority", "ours", "mine", "yours"]] == [line["parameters"] for line in lines]
    assert (False, True) == (before, named.are_ordinary(everything.parameters))


def test_the_parameters_of_our_own_client_are_not_named() -> None:
    """Content types describe values; an unknown one, or one for an output, asks for something."""
    made = client_request("m", {"x": np.zeros(2)}, content_type="np")
    named = NamedParameters()
    with capture_logs() as lines:
        named.note(made)
        own = (named.are_ordinary(made.parameters), len(lines))
        named.note(ask({"content_type": "jpeg"}))
        NamedParameters().note(ask(of_output={"content_type": "str"}))

    assert (True, 0) == own
    assert [["content_type"]] * 2 == [line["parameters"] for line in lines]


def test_a_client_cannot_fill_the_log_or_the_memory() -> None:
    """Neither with many names nor with long ones."""
    named = NamedParameters()
    with capture_logs() as lines:
        for number in range(1000):
            own: dict[str, Any] = {f"{number}".rjust(4) + "x" * 100_000: 1}
            named.note(ask(**own))

    assert MAX_NAMED == len(lines)
    assert [True] * (MAX_NAMED - 1) + [False] == [line["more_will_be_logged"] for line in lines]
    assert sum(len(str(line)) for line in lines) < 10_000
    assert sum(map(len, named._named)) < 10_000
    assert named.are_ordinary({"another": 1})


def test_only_what_is_obeyed_or_refused_is_not_named() -> None:
    silent = {name for name, row in REQUEST.items() if row.effect is not Effect.NONE}

    assert {"binary_data_output", "triton_enable_empty_final_response"} == silent
