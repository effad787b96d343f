"""Arrays that a request allocates in addition to its message are counted; views of it are not."""

import numpy as np
import pytest

from xlaserve.errors import BudgetExhausted
from xlaserve.net.ledger import Ledger
from xlaserve.serving.call import Call, Peer
from xlaserve.serving.inference import InferInput
from xlaserve.serving.made_arrays import hold_made, made_bytes, reserve_made
from xlaserve.tensors import BYTES, DATATYPES, Tensor

MESSAGE = bytes(64)
OWN = np.zeros(8, np.int64)
STRINGS = np.array([b"ab", b"c"], object)


@pytest.mark.parametrize(
    ("array", "size"),
    [
        (np.frombuffer(MESSAGE, np.float32), 0),
        (np.frombuffer(memoryview(MESSAGE)[8:40], np.float32).reshape(2, 4)[:1], 0),
        (np.ndarray((4,), np.int64, MESSAGE, 32), 0),
        (OWN, 64),
        (OWN.reshape(2, 4), 64),
        (STRINGS, 2 * 56 + 3),
        (np.array([["é"]], object), 56 + 1),
    ],
)
def test_what_is_made_is_counted(array: Tensor, size: int) -> None:
    datatype = BYTES if array.dtype.hasobject else DATATYPES["INT64"]
    given = InferInput("x", datatype, array)

    assert size == made_bytes([given])
    assert 2 * size == made_bytes([given, given])


def a_call(ledger: Ledger) -> Call:
    call = Call()
    call.peer = Peer(account=ledger.open())
    return call


def test_it_is_counted_until_the_call_ends() -> None:
    ledger = Ledger(1000)
    for count in (reserve_made, hold_made):
        call = a_call(ledger)
        count(call, 500)
        assert 500 == ledger.held
        call.end()
        assert 0 == ledger.held


def test_what_there_is_no_memory_for_is_refused_but_not_what_waits_already() -> None:
    ledger = Ledger(1000)
    call = a_call(ledger)
    with pytest.raises(BudgetExhausted, match="the tensors"):
        reserve_made(call, 800)
    assert 0 == ledger.held
    hold_made(call, 800)
    assert 800 == ledger.held


def test_calls_of_the_server_itself_are_not_counted() -> None:
    call = Call()
    reserve_made(call, 10)
    hold_made(call, 10)
    call.end()
