"""Arrays in the format of numpy's .npy files (NumPy Enhancement Proposal 1)."""

import re

import numpy as np
from numpy.lib import format as npy

from xlaserve.errors import InvalidBody
from xlaserve.tensors import (
    BYTES,
    Buffer,
    Datatype,
    Shape,
    Tensor,
    TensorDataError,
    describe,
    from_bytes,
    from_elements,
)

_VERSION = slice(6, 8)
_LENGTHS = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}
"""Size in bytes of the header length field, by format version."""
_MAX_HEADER_BYTES = 4096
"""Maximum length of a header; numpy writes 118 to 246 bytes."""
_LONGEST_SIZE = 18
"""Maximum digits of one dimension."""

# The header is a Python literal; searching for three fields is safer than evaluating it.
_DTYPE = re.compile(r"""['"]descr['"]\s*:\s*['"]([<>|=]?[biufSUV][0-9]{1,6})['"]""")
_ORDER = re.compile(r"""['"]fortran_order['"]\s*:\s*(True|False)""")
_SHAPE = re.compile(r"""['"]shape['"]\s*:\s*\(([0-9, ]*)\)""")


def read_npy(datatype: Datatype, body: memoryview) -> Tensor:
    """Return the array of a file, as a view if possible; its elements must match the datatype.

    Text and byte strings become BYTES. Object arrays, which could execute code, are refused. Raises
    InvalidBody if the file is malformed, and TensorDataError.
    """
    header, data = _split(body)
    found = [pattern.search(header) for pattern in (_DTYPE, _ORDER, _SHAPE)]
    if not all(found):
        raise InvalidBody(f"the header of the .npy file cannot be read: {header[:200]!r}")
    code, order, sizes = (match[1] for match in found if match)
    shape = _shape(sizes)
    file_order = shape[::-1] if order == "True" else shape
    array = _elements(datatype, file_order, _dtype(code), data)
    return np.ascontiguousarray(array.transpose()) if order == "True" else array


def write_npy(tensor: Tensor) -> list[Buffer]:
    """Return the parts of a file; the second is a view of a contiguous array."""
    array = np.ascontiguousarray(tensor)
    code = array.dtype.str if array.dtype.isbuiltin == 1 else f"<{_unnamed(array.dtype.itemsize)}"
    text = f"{{'descr': '{code}', 'fortran_order': False, 'shape': {tensor.shape}, }}"
    start = npy.magic(1, 0)
    padding = -(len(start) + 2 + len(text) + 1) % npy.ARRAY_ALIGN
    header = text.encode() + b" " * padding + b"\n"
    head = start + len(header).to_bytes(2, "little") + header
    return [head, array.reshape(-1).view(np.uint8).data]


def _unnamed(itemsize: int) -> str:
    """Return the code for a dtype that numpy does not have: raw bytes."""
    return f"V{itemsize}"


def _split(body: memoryview) -> tuple[str, memoryview]:
    """Split the header from the data."""
    size = _LENGTHS.get(bytes(body[_VERSION]))
    if bytes(body[: _VERSION.start]) != npy.MAGIC_PREFIX or size is None:
        raise InvalidBody("the body is not a .npy file of version 1, 2 or 3")
    start = _VERSION.stop + size
    length = int.from_bytes(body[_VERSION.stop : start], "little")
    if length > _MAX_HEADER_BYTES or start + length > len(body):
        raise InvalidBody(
            f"expected a header of at most {_MAX_HEADER_BYTES} bytes in the .npy file, "
            f"got one of {length} in {len(body)} bytes"
        )
    return bytes(body[start : start + length]).decode("latin1"), body[start + length :]


def _shape(text: str) -> Shape:
    sizes = [part.strip() for part in text.split(",") if part.strip()]
    if any(len(size) > _LONGEST_SIZE or not size.isdigit() for size in sizes):
        raise InvalidBody(f"the shape of the .npy file cannot be read: {text[:200]!r}")
    return tuple(map(int, sizes))


def _dtype(code: str) -> "np.dtype[np.generic]":
    try:
        dtype = np.dtype(code)
    except (TypeError, ValueError):
        raise InvalidBody(f"the .npy file has an unknown dtype '{code}'") from None
    if not dtype.itemsize:
        raise InvalidBody("the .npy file has elements of zero bytes")
    return dtype


def _elements(
    datatype: Datatype, shape: Shape, dtype: "np.dtype[np.generic]", data: memoryview
) -> Tensor:
    if datatype is BYTES and dtype.kind in "SU":
        if len(data) % dtype.itemsize:
            raise TensorDataError(f"elements of {dtype.itemsize} bytes", f"{len(data)} bytes")
        return from_elements(datatype, shape, np.frombuffer(data, dtype).tolist())
    raw = not datatype.has_buffer and dtype.str[1:] == _unnamed(datatype.itemsize)
    if dtype != datatype.dtype and not raw:
        raise TensorDataError(f"{datatype}", describe(str(dtype), shape))
    return from_bytes(datatype, shape, data)
