"""A failed load records a reason for clients only if the model is at fault."""

from collections.abc import Iterator

import pytest

from xlaserve import errors
from xlaserve.errors import XlaserveError, code
from xlaserve.residence.failed_loads import INTERNAL, FailedLoads

OF_THE_MODEL = {
    *(errors.LoadFailed, errors.StoreUnavailable, errors.FilesMissing, errors.FileNameTooLong),
    *(errors.LoadTimedOut, errors.InvalidModel, errors.TooManyAbandoned),
    *(errors.OutOfMemory, errors.OutOfMappings, errors.OutOfSpace, errors.OutOfFiles),
    *(value for value in vars(code).values() if isinstance(value, type)),
} - {XlaserveError}
"""Errors that are recorded as a model's failure; a new kind is not recorded until listed here."""


def every_error(of: type[XlaserveError] = XlaserveError) -> Iterator[type[XlaserveError]]:
    # Skip errors that other tests define.
    for kind in of.__subclasses__():
        if kind.__module__.startswith("xlaserve."):
            yield kind
            yield from every_error(kind)


@pytest.mark.parametrize("kind", sorted(every_error(), key=str), ids=lambda kind: kind.__name__)
async def test_a_failure_is_kept_if_it_is_of_the_model(kind: type[XlaserveError]) -> None:
    """Other errors leave the earlier reason in place, unless the model is gone."""
    failed = FailedLoads()
    failed.note("m", "before")

    async def load() -> None:
        error = kind.__new__(kind)
        error.args = ("now",)
        raise error

    with pytest.raises(kind):
        await failed.noting("m", load)

    is_gone = issubclass(kind, errors.ModelNotFound)
    expected = "now" if kind in OF_THE_MODEL else "" if is_gone else "before"
    assert expected == failed.reason("m")


async def test_a_fault_of_the_server_is_kept_without_its_text() -> None:
    failed = FailedLoads()

    async def load() -> None:
        raise ZeroDivisionError("of ours")

    with pytest.raises(ZeroDivisionError):
        await failed.noting("m", load)

    assert INTERNAL == failed.reason("m")
