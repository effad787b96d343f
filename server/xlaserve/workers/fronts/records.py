"""Records on a bridge between two processes: lists that begin with their kind, in msgpack.

Those of one turn of the event loop go in one frame. A tensor is the index of its name, its shape,
and its bytes; or how many bytes it has in the slab of the sender, at the place that the record
names, each tensor behind the one before, aligned.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from xlaserve.python_models.process.slab import SlabError, SlabReader, aligned
from xlaserve.tensors import (
    BYTES,
    DATATYPES,
    Buffer,
    Datatype,
    Tensor,
    TensorSpec,
    from_bytes,
    to_bytes,
)

LENGTH = struct.Struct("<Q")
"""In front of each frame: its bytes."""
NOWHERE = -1
"""The place of tensors that are in their record."""

_COPIED_BYTES = 4096

Record: TypeAlias = Sequence[Any]
"""One message; its first element is one of Kind."""


class Kind:
    """Kinds of records, as numbers: a member of an enumeration takes as long as all else of one."""

    REQUEST = 0
    """Number, handle of the model, id, place, inputs, rows, key, chosen outputs, when its model was
    found (ns), and Extra as a map or None."""
    CANCEL = 1
    """Number of an abandoned request, and whether its answers so far were all
    that its client wanted."""
    MIRRORED = 2
    """Number of the revision of MODELS that the front end shows from now on."""
    DROPPED = 3
    """Places in the other side's slab without views."""
    ANSWER = 4
    """Number, place, outputs, begin and end of the execution (ns), its rows, and parameters of the
    answer and of its outputs, or None."""
    FAILURE = 5
    """Number, class and text of the error, and bytes that an OutOfMemory says were needed."""
    MODELS = 6
    """Revision, models that have changed, names of those that are gone, and whether the start of
    the engine is done."""
    PART = 7
    """Number, place, outputs, and parameters as in ANSWER: an answer that is not the last."""
    TAKEN = 8
    """Number, and how many answers its client's stream has taken since this was said last."""
    BATCH = 9
    """Between workers: number, model, identity of its load, place, and inputs. ANSWER then has no
    rows and no parameters."""
    REFUSED = 10
    """Number of a batch that was not begun."""


PLACES = {Kind.REQUEST: 4, Kind.ANSWER: 2, Kind.PART: 2, Kind.BATCH: 4}
"""Where the records of a kind have the place of their tensors."""


class Extra:
    """Keys of what few requests have."""

    PARAMETERS = "p"
    INPUT_PARAMETERS = "i"
    OUTPUT_PARAMETERS = "o"
    DEADLINE = "d"
    """Seconds of the clock of event loops, which is the same in all processes of a machine."""
    PRINCIPAL = "n"
    """Name of the caller."""
    CALLER = "c"
    """Who takes turns with others, where that is no principal: for models that have turns."""
    TAKES_MANY = "m"
    """Whether the client can be given more than one answer: of requests that may have many."""
    WANTS_WHOLE = "w"
    """Whether it wants one even so."""


def tensors_of(
    specs: Sequence[TensorSpec], flat: Sequence[Any], place: int, reader: SlabReader | None
) -> dict[str, Tensor]:
    """Return the tensors of a record by name, as views of its bytes or of the sender's slab.

    Raises SlabError, TensorDataError, or IndexError, for what the other side cannot have meant.
    """
    found = {}
    if place == NOWHERE:
        for at in range(0, len(flat), 3):
            spec = specs[flat[at]]
            found[spec.name] = _viewed(spec.datatype, flat[at + 1], flat[at + 2])
        return found
    if reader is None:
        raise SlabError("there is no slab")
    start, whole = 0, reader.view(place, sum(aligned(size) for size in flat[2::3]))
    for at in range(0, len(flat), 3):
        spec, size = specs[flat[at]], flat[at + 2]
        found[spec.name] = _viewed(spec.datatype, flat[at + 1], whole[start : start + size])
        start += aligned(size)
    return found


def as_given(
    specs: Sequence[TensorSpec], flat: Sequence[Any]
) -> tuple[Sequence[TensorSpec], list[Any]]:
    """Return what the outputs of a lenient model are, and the record with their places there.

    Raises IndexError or KeyError for what the other side cannot have meant.
    """
    told, found = [], list(flat)
    for at in range(0, len(flat), 3):
        place, datatype = flat[at]
        told.append(TensorSpec(specs[place].name, DATATYPES[datatype], tuple(flat[at + 1])))
        found[at] = at // 3
    return told, found


def _viewed(datatype: Datatype, shape: Sequence[int], data: Buffer) -> Tensor:
    if datatype is BYTES:
        return from_bytes(datatype, shape, data)
    # The other end has checked them: to do so again is most of what a small tensor costs.
    return np.ndarray(shape, datatype.dtype, data)


def bytes_of(datatype: Datatype, tensor: Tensor) -> bytes | memoryview:
    """Return the bytes of a tensor, as a copy where that takes less time than a view."""
    if tensor.nbytes <= _COPIED_BYTES and datatype is not BYTES:
        return tensor.tobytes()
    return to_bytes(datatype, tensor)


def parameters_of(said: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a map of Extra; empty where the request has none."""
    found: Mapping[str, Any] = said.get(key, {})
    return found
