"""Memory accounting of arrays that parsing a request allocates besides its message.

Most inputs are views of their message, which is already accounted. Typed contents and BYTES
elements are not: one byte of the message may become eight, or fifty.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from xlaserve.serving.call import Call
from xlaserve.serving.inference import InferInput
from xlaserve.tensors import Tensor
from xlaserve.tensors.byte_elements import PIECE_ELEMENTS

ELEMENT_BYTES = 56
"""Python's overhead for one BYTES element: the `bytes` object without its data, and a reference."""

SHORT_BYTES = 64 << 10
"""Arrays of messages up to this size are charged only if the call is queued, since an immediate
answer frees them.
"""


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
    """Return the total length of the elements of a BYTES array."""
    return sum(_texts_bytes(array))


def _texts_bytes(array: Tensor) -> Iterator[int]:
    # In pieces: listing all elements in one step would hold the GIL.
    flat = array.reshape(-1)
    for start in range(0, len(flat), PIECE_ELEMENTS):
        yield sum(map(len, flat[start : start + PIECE_ELEMENTS].tolist()))


def reserve_made(call: Call, size: int, what: str = "the tensors") -> None:
    """Charge the connection's account until the call ends; raises BudgetExhausted."""
    account = call.peer.account
    if account is None or not size:
        return
    account.take(what, size)
    call.hold(partial(account.release, size))


def hold_made(call: Call, size: int) -> None:
    """Charge the connection's account until the queued call ends; never raises."""
    account = call.peer.account
    if account is not None and size:
        account.hold(size)
        call.hold(partial(account.release, size))
