"""The status table has a row for every error."""

from collections.abc import Iterator

import pytest
from grpclib.const import Status

from xlaserve.errors import InvalidTensor, ModelNotFound, RegionNotFound, XlaserveError
from xlaserve.transport.status import STATUSES, wire_status


def descendants(kind: type[XlaserveError]) -> Iterator[type[XlaserveError]]:
    for child in kind.__subclasses__():
        yield child
        yield from descendants(child)


MODULES = ("xlaserve.errors", "xlaserve.code_errors")
OURS = [kind for kind in descendants(XlaserveError) if kind.__module__ in MODULES]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[XlaserveError]) -> None:
    """By a row of its own or of a parent; the root has none, so nothing slips through."""
    assert any(parent in STATUSES for parent in kind.__mro__)


def test_only_an_unknown_model_is_not_found() -> None:
    """ModelMesh drops and reloads a model when it sees NOT_FOUND of an inference."""
    of_no_inference = [RegionNotFound]

    assert [ModelNotFound, *of_no_inference] == [
        k for k, row in STATUSES.items() if row.grpc is Status.NOT_FOUND
    ]


def test_a_subclass_has_the_row_of_its_parent() -> None:
    error = InvalidTensor("m", "input", "x", "FP32[1]", "FP32[2]")

    assert (Status.INVALID_ARGUMENT, 400) == (wire_status(error).grpc, wire_status(error).http)
