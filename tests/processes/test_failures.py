"""Errors keep their class, text and fields when they cross processes."""

import inspect
import json
from types import ModuleType
from typing import Any

import msgspec
import pytest

from xlaserve import errors
from xlaserve.errors import InvalidParameter, LoadFailed, OutOfMemory, XlaserveError
from xlaserve.errors import code as code_errors
from xlaserve.errors import language as language_errors
from xlaserve.errors import sequence as sequence_errors
from xlaserve.openai.errors import error_body, name_field
from xlaserve.python_models.process.errors import named, raised
from xlaserve.workers.failures import error_of, failure_of
from xlaserve.workers.messages import Failure

MODULES: tuple[ModuleType, ...] = (errors, code_errors, sequence_errors, language_errors)
CLASSES = {
    name: found
    for module in MODULES
    for name, found in vars(module).items()
    if inspect.isclass(found) and issubclass(found, XlaserveError)
}


def crossed(error: BaseException) -> Any:
    """Return an error as it arrives from another process."""
    return error_of(msgspec.json.decode(msgspec.json.encode(failure_of(error)), type=Failure))


@pytest.mark.parametrize("name", CLASSES)
def test_the_class_that_decides_the_status_is_the_same(name: str) -> None:
    made = CLASSES[name].__new__(CLASSES[name])
    Exception.__init__(made, "said")

    assert (CLASSES[name], "said") == (type(crossed(made)), str(crossed(made)))
    assert type(made) is type(raised(named(made)))


@pytest.mark.parametrize(
    ("error", "attribute", "expected"),
    [
        (InvalidParameter("json_schema", "one", "another"), "parameter", "json_schema"),
        (InvalidParameter("half \ud800", "one", "another"), "parameter", "half \\ud800"),
        (OutOfMemory("m", "memory", needed_bytes=1 << 40), "needed_bytes", 1 << 40),
        (LoadFailed("m", "a reason"), "reason", "a reason"),
    ],
)
def test_its_facts_come_along(error: XlaserveError, attribute: str, expected: object) -> None:
    assert expected == getattr(crossed(error), attribute)


def test_what_has_no_form_stays_behind() -> None:
    error = LoadFailed("m", "a reason")
    vars(error).update(call_record=object(), size=1 << 70, is_noted=True)
    vars(error).update(share=float("nan"), most=float("inf"), least=float("-inf"))

    assert {"reason": "a reason"} == vars(crossed(error))


@pytest.mark.parametrize(
    ("across", "expected"), [(crossed, "response_format"), (lambda e: raised(named(e)), None)]
)
def test_a_client_of_openai_is_told_of_it(across: Any, expected: str | None) -> None:
    """Even if the model process raised it without a parameter."""
    error = across(InvalidParameter("json_schema", "one", "another"))
    name_field(error, {"json_schema": "response_format"})
    said = json.loads(msgspec.json.encode(error_body(str(error), 400, error)))  # type: ignore[arg-type]

    assert expected == said["error"]["param"]
