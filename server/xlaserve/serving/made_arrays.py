"""Arrays that a request makes beside its message, on the ledger of its connection.

Most inputs are views of their message, which is counted already. Numbers in typed contents and
elements of BYTES are not: what is one byte of a message may become eight, or fifty.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from xlaserve.serving.call import Call
from xlaserve.serving.inference import InferInput
from xlaserve.tensors import Tensor
from xlaserve.tensors.byte_elements import PIECE_ELEMENTS

ELEMENT_BYTES = 56
"""Bytes that Python takes for an element of BYTES besides its octets, with the reference to it."""

SHORT_BYTES = 64 << 10
"""Messages up to this length are counted where they wait, and not where they are answered at once:
what they become is gone then."""


def made_bytes(inputs: Iterable[InferInput]) -> int:
    """Return the bytes of input arrays that are not views of their message."""
    return sum(_own_bytes(given.data) for given in inputs)


def _own_bytes(array: Tensor) -> int:
    if array.dtype.hasobject:
        return array.size * ELEMENT_BYTES + octets_of(array)
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return array.nbytes if isinstance(owner, np.ndarray) else 0


def octets_of(array: Tensor) -> int:
    """Return how long the elements of an array of BYTES are together."""
    return sum(_texts_bytes(array))


def _texts_bytes(array: Tensor) -> Iterator[int]:
    # By pieces: a list of all elements would hold the interpreter's lock.
    flat = array.reshape(-1)
    for start in range(0, len(flat), PIECE_ELEMENTS):
        yield sum(map(len, flat[start : start + PIECE_ELEMENTS].tolist()))


def reserve_made(call: Call, size: int, what: str = "the tensors") -> None:
    """Charge bytes until a call ends; raises BudgetExhausted without memory."""
    account = call.peer.account
    if account is None or not size:
        return
    account.take(what, size)
    call.hold(partial(account.release, size))


def hold_made(call: Call, size: int) -> None:
    """Charge bytes of a queued call until it ends."""
    account = call.peer.account
    if account is not None and size:
        account.hold(size)
        call.hold(partial(account.release, size))
