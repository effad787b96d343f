"""The records sent over a bridge: msgpack lists that start with their kind.

Records sent in the same iteration of the event loop share a frame. A tensor is encoded as the index
of its name, its shape, and its bytes; or, if the tensors of a record are in the sender's slab, its
size instead of the bytes. In the slab they follow one another, aligned, from the offset in the
record.
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
"""Header of each frame: its size in bytes."""
NOWHERE = -1
"""Slab offset in a record that itself contains the bytes of its tensors."""

_COPIED_BYTES = 4096

Record: TypeAlias = Sequence[Any]
"""A message; its first element is a Kind."""


class Kind:
    """Kinds of records, as plain integers: enum members would double the time per record."""

    REQUEST = 0
    """Number, model handle, id, slab offset, inputs, rows, batching key, selected outputs, time at
    which its model was found (ns), client, and Extra as a map or None."""
    CANCEL = 1
    """Number of an abandoned request, and whether its client had all the responses it wanted."""
    MIRRORED = 2
    """Revision of MODELS that the front end shows from now on."""
    DROPPED = 3
    """Offsets of blocks in the receiver's slab that the sender has stopped using."""
    ANSWER = 4
    """Number, slab offset, outputs, start and end of the execution (ns), its rows, and parameters
    of the response and its outputs, or None."""
    FAILURE = 5
    """Number, class, text and attributes of an error."""
    MODELS = 6
    """Revision, changed models, names of removed models, and whether the engine has loaded its
    initial models."""
    PART = 7
    """Number, slab offset, outputs and parameters (see ANSWER) of a response that is not the
    last."""
    TAKEN = 8
    """Number, and how many responses the client's stream has taken since the last TAKEN."""
    BATCH = 9
    """Between workers: number, model, identity of its load, slab offset, and inputs. The ANSWER
    then has neither rows nor parameters."""
    REFUSED = 10
    """Number of a batch that was rejected without being begun."""


PLACES = {Kind.REQUEST: 4, Kind.ANSWER: 2, Kind.PART: 2, Kind.BATCH: 4}
"""Index of the slab offset in the records of each kind."""


class Extra:
    """Keys of optional request fields that few requests have."""

    PARAMETERS = "p"
    INPUT_PARAMETERS = "i"
    OUTPUT_PARAMETERS = "o"
    DEADLINE = "d"
    """Deadline in seconds of the event loop's clock, which all processes on a machine share."""
    PRINCIPAL = "n"
    """Name of the authenticated caller."""
    CALLER = "c"
    """Caller's name for fair scheduling, if there is no principal; for language models."""
    TAKES_MANY = "m"
    """Whether the client accepts several responses; sent to decoupled models."""
    WANTS_WHOLE = "w"
    """Whether a client that accepts several responses still wants a single one."""


def tensors_of(
    specs: Sequence[TensorSpec], flat: Sequence[Any], place: int, reader: SlabReader | None
) -> dict[str, Tensor]:
    """Return a record's tensors by name, as views of its bytes or of the sender's slab.

    Raises SlabError, TensorDataError, or IndexError if the record is invalid.
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
    """Return the specs of a lenient model's outputs, and the record with indices into them.

    Raises IndexError or KeyError if the record is invalid.
    """
    returned, found = [], list(flat)
    for at in range(0, len(flat), 3):
        place, datatype = flat[at]
        returned.append(TensorSpec(specs[place].name, DATATYPES[datatype], tuple(flat[at + 1])))
        found[at] = at // 3
    return returned, found


def _viewed(datatype: Datatype, shape: Sequence[int], data: Buffer) -> Tensor:
    if datatype is BYTES:
        return from_bytes(datatype, shape, data)
    # Already validated by the peer; validating small tensors again would dominate their cost.
    return np.ndarray(shape, datatype.dtype, data)


def bytes_of(datatype: Datatype, tensor: Tensor) -> bytes | memoryview:
    """Return a tensor's bytes, copied if it is so small that a copy is faster than a view."""
    if tensor.nbytes <= _COPIED_BYTES and datatype is not BYTES:
        return tensor.tobytes()
    return to_bytes(datatype, tensor)


def parameters_of(extra: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a map in Extra; empty if the request has none."""
    found: Mapping[str, Any] = extra.get(key, {})
    return found
