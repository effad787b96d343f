"""The status table has a row for every error."""

from collections.abc import Iterator

import pytest
from grpclib.const import Status

from xlaserve import client
from xlaserve.errors import (
    EngineGone,
    EngineLost,
    InvalidTensor,
    ModelNotFound,
    RegionNotFound,
    WorkerDied,
    XlaserveError,
)
from xlaserve.errors.code import ProcessAbsent, ProcessLost
from xlaserve.errors.sequence import StatesLost
from xlaserve.net.status import REACTIONS, STATUSES, wire_status


def descendants(kind: type[XlaserveError]) -> Iterator[type[XlaserveError]]:
    for child in kind.__subclasses__():
        yield child
        yield from descendants(child)


MODULES = ("xlaserve.errors", "xlaserve.errors.code")
OURS = [kind for kind in descendants(XlaserveError) if kind.__module__ in MODULES]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status(kind: type[XlaserveError]) -> None:
    """It has its own row or that of a parent; the root class has none, so none is missed."""
    assert any(parent in STATUSES for parent in kind.__mro__)


def test_only_an_unknown_model_is_not_found() -> None:
    """ModelMesh drops and reloads a model when an inference returns NOT_FOUND."""
    of_no_inference = [RegionNotFound]

    assert [ModelNotFound, *of_no_inference] == [
        k for k, row in STATUSES.items() if row.grpc is Status.NOT_FOUND
    ]


def test_a_subclass_has_the_row_of_its_parent() -> None:
    error = InvalidTensor("m", "input", "x", "FP32[1]", "FP32[2]")

    assert (Status.INVALID_ARGUMENT, 400) == (wire_status(error).grpc, wire_status(error).http)


@pytest.mark.parametrize("kind", [ProcessLost, EngineLost, StatesLost, WorkerDied])
def test_what_took_its_process_with_it_is_not_sent_again(kind: type[XlaserveError]) -> None:
    status = wire_status(kind.__new__(kind))

    assert (Status.INTERNAL, 500) == (status.grpc, status.http)
    assert not REACTIONS[status.grpc].is_repeated


@pytest.mark.parametrize("kind", [ProcessAbsent, EngineGone])
def test_what_had_not_begun_is_sent_again(kind: type[XlaserveError]) -> None:
    status = wire_status(kind.__new__(kind))

    assert (Status.UNAVAILABLE, 503) == (status.grpc, status.http)
    assert REACTIONS[status.grpc].is_repeated


def test_the_client_sends_again_what_the_table_says() -> None:
    repeated = {
        status.name
        for status, one in REACTIONS.items()
        if "`retries` of this client" in one.clients
    }

    assert client._RETRIED == repeated
