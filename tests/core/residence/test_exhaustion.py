"""Loads that fail because disk space or file descriptors ran out."""

import errno

import pytest

from xlaserve.errors import InvalidModel, LoadFailed, OutOfFiles, OutOfSpace
from xlaserve.residence.repository.exhaustion import load_failure


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.EMFILE, OutOfFiles), (errno.ENOSPC, OutOfSpace), (errno.EIO, LoadFailed)],
)
def test_the_cause_is_found_however_deep_it_lies(number: int, expected: type[Exception]) -> None:
    inner, outer = InvalidModel("weights.safetensors cannot be read"), InvalidModel("model.json")
    inner.__cause__ = OSError(number, "from the system")
    outer.__cause__ = inner

    assert expected is type(load_failure("m", "of a file", outer))


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = InvalidModel("wrong")
    error.__cause__ = error

    assert LoadFailed is type(load_failure("m", "wrong", error))


def test_a_failure_without_a_cause_is_the_models() -> None:
    assert LoadFailed is type(load_failure("m", "wrong", InvalidModel("wrong")))
