"""Reads `jax.export` files without JAX, which rejects those older than six months.

They are flatbuffers, whose field numbers never change. Only functions for one device and without
side effects are supported.
"""

import struct
from dataclasses import dataclass

from xlaserve.artifact.computation import Abstract, Computation, Tree
from xlaserve.errors import InvalidModel


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The contents of a `jax.export` file."""

    computation: Computation
    jax_version: str
    """JAX version that wrote the file, or an empty string before jax 0.11, which added the field.
    """


class _Exported:
    """Vtable offsets of the root table's fields."""

    IN_TREE = 8
    IN_AVALS = 10
    OUT_TREE = 12
    OUT_AVALS = 14
    FEW_DEVICES = 16
    PLATFORMS = 22
    ORDERED_EFFECTS = 24
    UNORDERED_EFFECTS = 26
    MODULE = 30
    CALLING_CONVENTION = 32
    KEPT = 34
    IS_OPEN = 36
    DEVICES = 40
    UNIQUE_AVALS = 42
    IN_AVAL_INDEXES = 48
    OUT_AVAL_INDEXES = 50
    JAX_VERSION = 56


class _Tree:
    KIND = 4
    CHILDREN = 6
    NAMES = 8


class _Aval:
    KIND = 4
    SHAPE = 6
    DTYPE = 8


_LEAF, _NONE, _TUPLE, _LIST, _DICT = range(5)

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", "bfloat16", "int4", "uint4"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("float0", "float8_e4m3", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"),
)
"""Dtypes by their number in the file."""

_MAX_DEPTH = 32
_OFFSET_BYTES = 4


def read(data: bytes | bytearray, name: str) -> Wrapped:
    """Parse a file; raises InvalidModel."""
    try:
        return _wrapped(_Table(memoryview(data), _number(memoryview(data), "<I", 0)), name)
    # In any other file, offsets may point outside the file or to invalid text.
    except (LookupError, ValueError, struct.error) as error:
        raise InvalidModel(f"{name} is not a jax.export artifact: {error}") from error


def shapes(data: bytes | bytearray, name: str) -> list[str]:
    """Return all shapes in a file as text, in the form that JAX will parse; raises InvalidModel."""
    try:
        root = _Table(memoryview(data), _number(memoryview(data), "<I", 0))
        fields = (_Exported.UNIQUE_AVALS, _Exported.IN_AVALS, _Exported.OUT_AVALS)
        return [
            text
            for field in fields
            for table in root.tables(field)
            for text in table.texts(_Aval.SHAPE)
        ]
    # In any other file, offsets may point outside the file or to invalid text.
    except (LookupError, ValueError, struct.error) as error:
        raise InvalidModel(f"{name} is not a jax.export artifact: {error}") from error


def _wrapped(root: "_Table", name: str) -> Wrapped:
    devices = root.number(_Exported.DEVICES, "<I") or root.number(_Exported.FEW_DEVICES, "<h")
    if devices != 1:
        raise InvalidModel(f"{name} was exported for {devices} devices, expected 1")
    if root.tables(_Exported.ORDERED_EFFECTS) or root.tables(_Exported.UNORDERED_EFFECTS):
        raise InvalidModel(f"{name} has side effects, which models may not have")
    arguments = _abstracts(root, _Exported.IN_AVALS, _Exported.IN_AVAL_INDEXES)
    results = _abstracts(root, _Exported.OUT_AVALS, _Exported.OUT_AVAL_INDEXES)
    kept = root.numbers(_Exported.KEPT, "<H")
    computation = Computation(
        module=root.data(_Exported.MODULE),
        calling_convention=root.number(_Exported.CALLING_CONVENTION, "<H"),
        platforms=root.texts(_Exported.PLATFORMS),
        arguments=arguments,
        results=results,
        unused=tuple(sorted(set(range(len(arguments))) - set(kept))),
        is_open=bool(root.number(_Exported.IS_OPEN, "<?")),
        takes=_whole_tree(root.table(_Exported.IN_TREE), len(arguments)),
        returns=_whole_tree(root.table(_Exported.OUT_TREE), len(results)),
    )
    return Wrapped(computation, root.text(_Exported.JAX_VERSION))


def _abstracts(root: "_Table", field: int, indexes: int) -> tuple[Abstract, ...]:
    # Since April 2026 each distinct shape and dtype is stored once, and referred to by index.
    unique = [_abstract(table) for table in root.tables(_Exported.UNIQUE_AVALS)]
    if found := root.numbers(indexes, "<I"):
        return tuple(unique[index] for index in found)
    return tuple(_abstract(table) for table in root.tables(field))


def _abstract(table: "_Table") -> Abstract:
    if table.number(_Aval.KIND, "<b"):
        raise ValueError("an argument or a result is not an array")
    shape = ", ".join(table.texts(_Aval.SHAPE))
    return Abstract(DTYPES[table.number(_Aval.DTYPE, "<B")], shape)


def _whole_tree(table: "_Table", count: int) -> Tree:
    leaves = list(range(count))
    tree = _tree(table, leaves, _MAX_DEPTH)
    if leaves:
        raise ValueError(f"{len(leaves)} arrays are missing from its argument and result trees")
    return tree


def _tree(table: "_Table", leaves: list[int], depth: int) -> Tree:
    """Read a tree, taking its leaves from the front of the list."""
    if not depth:
        raise ValueError("its arguments or results are nested too deeply")
    kind = table.number(_Tree.KIND, "<b")
    if kind == _LEAF:
        return leaves.pop(0)
    branches = [_tree(child, leaves, depth - 1) for child in table.tables(_Tree.CHILDREN)]
    if kind == _NONE:
        return None
    if kind == _TUPLE:
        return tuple(branches)
    if kind == _LIST:
        return branches
    if kind == _DICT:
        return dict(zip(table.texts(_Tree.NAMES), branches, strict=True))
    raise ValueError("its arguments or results use a custom pytree class")


# --- flatbuffers -------------------------------------------------------------------------------


def _number(data: memoryview, layout: str, position: int) -> int:
    if position < 0:
        raise ValueError("an offset points outside the file")
    value: int = struct.unpack_from(layout, data, position)[0]
    return value


class _Table:
    """A flatbuffer table; absent fields are zero or empty."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        self._vtable = position - _number(data, "<i", position)
        self._vtable_bytes = _number(data, "<H", self._vtable)

    def number(self, field: int, layout: str) -> int:
        """Return a scalar in the given `struct` format."""
        position = self._place(field)
        return _number(self._data, layout, position) if position else 0

    def numbers(self, field: int, layout: str) -> tuple[int, ...]:
        """Return a vector of numbers."""
        start, count = self._vector(field, struct.calcsize(layout))
        return struct.unpack_from(f"<{count}{layout[1]}", self._data, start)

    def data(self, field: int) -> bytes:
        """Return a vector of bytes."""
        start, count = self._vector(field, 1)
        return bytes(self._data[start : start + count])

    def text(self, field: int) -> str:
        """Return a string."""
        return str(self.data(field), "utf-8")

    def texts(self, field: int) -> tuple[str, ...]:
        """Return a vector of strings."""
        return tuple(self._text(place) for place in self._places(field))

    def table(self, field: int) -> "_Table":
        """Return a required table."""
        place = self._place(field)
        if not place:
            raise ValueError(f"field {field} is missing")
        return _Table(self._data, self._follow(place))

    def tables(self, field: int) -> "list[_Table]":
        """Return a vector of tables."""
        return [_Table(self._data, self._follow(place)) for place in self._places(field)]

    def _place(self, field: int) -> int:
        if field >= self._vtable_bytes:
            return 0
        offset = _number(self._data, "<H", self._vtable + field)
        return self._position + offset if offset else 0

    def _follow(self, place: int) -> int:
        return place + _number(self._data, "<I", place)

    def _places(self, field: int) -> range:
        start, count = self._vector(field, _OFFSET_BYTES)
        return range(start, start + count * _OFFSET_BYTES, _OFFSET_BYTES)

    def _text(self, place: int) -> str:
        start, count = self._measured(self._follow(place), 1)
        return str(self._data[start : start + count], "utf-8")

    def _vector(self, field: int, item_bytes: int) -> tuple[int, int]:
        """Return the start and length of a vector."""
        place = self._place(field)
        return self._measured(self._follow(place), item_bytes) if place else (0, 0)

    def _measured(self, position: int, item_bytes: int) -> tuple[int, int]:
        count = _number(self._data, "<I", position)
        start = position + _OFFSET_BYTES
        if start + count * item_bytes > len(self._data):
            raise ValueError("a part extends past the end of the file")
        return start, count
