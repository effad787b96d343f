"""Validation of requests against their model, as strict as Triton's."""

from typing import Any

import numpy as np
import pytest

from xlaserve.errors import InvalidRequest
from xlaserve.runtime.loaded import ModelInfo
from xlaserve.serving.checks import QuickCheck, check_inputs, check_outputs
from xlaserve.serving.inference import Form, InferInput, InferRequest, RequestedOutput
from xlaserve.tensors import DATATYPES, TensorSpec

FP32, INT32 = DATATYPES["FP32"], DATATYPES["INT32"]
INFO = ModelInfo(
    "fake",
    (TensorSpec("a", FP32, (-1, 2)), TensorSpec("b", INT32, (-1, 3))),
    (TensorSpec("y", FP32, (-1, 2)), TensorSpec("z", FP32, (-1, 2))),
    max_batch_size=4,
)
UNBATCHED = ModelInfo("fake", (TensorSpec("a", FP32, (-1, 2)),), (), max_batch_size=0)


def a(rows: int = 1, columns: int = 2, dtype: Any = np.float32, **parameters: Any) -> InferInput:
    datatype = FP32 if dtype is np.float32 else DATATYPES["FP64"]
    return InferInput("a", datatype, np.zeros((rows, columns), dtype), parameters)


def b(rows: int = 1) -> InferInput:
    return InferInput("b", INT32, np.zeros((rows, 3), np.int32))


def request(*inputs: InferInput, **parameters: Any) -> InferRequest:
    return InferRequest("m", inputs=inputs, parameters=parameters)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_inputs_in_any_order_fit(rows: int) -> None:
    check_inputs("m", INFO, request(b(rows), a(rows)))


def test_a_first_dimension_that_is_no_batch_takes_any_size() -> None:
    check_inputs("m", UNBATCHED, request(a(1000)))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (request(a()), "model 'm': expected 2 inputs but got 1, missing 'b'"),
        (request(), "expected 2 inputs but got 0, missing 'a', 'b'"),
        (request(a(), a(), b()), "input 'a' already exists in request"),
        (request(a(), a()), "input 'a' already exists in request"),
        (
            request(a(), b(), InferInput("c", FP32, np.zeros(1, np.float32))),
            "unexpected inference input 'c', it has 'a', 'b'",
        ),
        (
            request(a(dtype=np.float64), b()),
            r"input 'a': expected FP32\[-1,2\], got FP64\[1,2\]",
        ),
        (request(a(columns=3), b()), r"input 'a': expected FP32\[-1,2\], got FP32\[1,3\]"),
        (
            request(InferInput("a", FP32, np.zeros(2, np.float32)), b()),
            r"input 'a': expected FP32\[-1,2\], got FP32\[2\]",
        ),
        (request(a(5), b(5)), r"input 'a': expected a batch of 1 to 4 rows, got FP32\[5,2\]"),
        (request(a(0), b(0)), r"input 'a': expected a batch of 1 to 4 rows, got FP32\[0,2\]"),
        (request(a(2), b(1)), r"input 'b': expected 2 rows as in input 'a', got INT32\[1,3\]"),
        (request(a(), b(), triton_secret=1), "parameter 'triton_secret'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(bad: InferRequest, text: str) -> None:
    """The error names the model, the tensor, what was expected and what was received."""
    with pytest.raises(InvalidRequest, match=text):
        check_inputs("m", INFO, bad)
    assert QuickCheck(INFO).inputs(bad) is None


@pytest.mark.parametrize(
    "ordinary",
    [
        request(a(2), b(2)),
        request(b(), a(), sequence_id=3, binary_data_output=True),
        request(a(), b(), triton_enable_empty_final_response=True),
    ],
)
def test_ordinary_inputs_are_known_at_a_glance(ordinary: InferRequest) -> None:
    """Once the log has reported the parameters without effect, no further check is needed."""
    check_inputs("m", INFO, ordinary)
    quick = QuickCheck(INFO)
    quick.parameters.note(ordinary)
    found = quick.inputs(ordinary)

    assert found is not None
    assert ({"a", "b"}, len(ordinary.inputs[0].data)) == (set(found[0]), found[1])


def test_a_request_without_parameters_pays_nothing_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = QuickCheck(INFO)
    monkeypatch.setattr(quick, "parameters", None)

    assert quick.inputs(request(a(2), b(2))) is not None


def of_form(form: Form, rows: int) -> InferRequest:
    return InferRequest("m", inputs=(a(rows), b(rows)), form=form)


def test_a_form_is_checked_once() -> None:
    """Requests of one form have the same rows; this request would fail a second check."""
    quick, form = QuickCheck(INFO), Form()
    found = [quick.inputs(of_form(form, rows)) for rows in (2, 3)]

    assert [2, 2] == [each[1] for each in found if each is not None]
    assert [2, 3] == [len(each[0]["a"]) for each in found if each is not None]


def test_a_form_that_another_model_accepts_is_checked() -> None:
    """As after a reload, when the same bytes arrive for a model with other inputs."""
    form, other = Form(), ModelInfo("fake", INFO.inputs[:1], (), max_batch_size=4)
    assert QuickCheck(INFO).inputs(of_form(form, 2)) is not None

    assert QuickCheck(other).inputs(of_form(form, 2)) is None


def test_a_form_that_was_refused_is_checked_again() -> None:
    quick, form = QuickCheck(INFO), Form()

    assert [None, None] == [quick.inputs(of_form(form, 5)) for _ in range(2)]


def test_a_form_with_parameters_is_checked_each_time() -> None:
    """Whether parameters are ordinary depends on what the log has reported."""
    quick, form = QuickCheck(INFO), Form()
    named = InferRequest("m", inputs=(a(), b()), parameters={"binary_data_output": True}, form=form)
    quick.parameters.note(named)
    assert quick.inputs(named) is not None

    assert form.accepted_by is None


@pytest.mark.parametrize(
    ("asked", "expected"), [([], ["y", "z"]), (["z"], ["z"]), (["z", "y"], ["z", "y"])]
)
def test_outputs_come_in_the_order_asked_for(asked: list[str], expected: list[str]) -> None:
    chosen = check_outputs("m", INFO, [RequestedOutput(name) for name in asked])

    assert expected == [spec.name for spec in chosen]


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (["q"], "unexpected inference output 'q', it has 'y', 'z'"),
        (["y", "y"], "output 'y' already exists"),
    ],
)
def test_outputs_that_the_model_lacks_are_refused(asked: list[str], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        check_outputs("m", INFO, [RequestedOutput(name) for name in asked])
