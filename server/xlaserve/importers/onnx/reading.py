"""Reads ONNX files into plain graphs, with limits on size, nesting and paths."""

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from xlaserve.errors import InvalidModel
from xlaserve.files import files
from xlaserve.files.roots import ANYWHERE, Roots
from xlaserve.importers.onnx.datatypes import STRING, any_dtype_of, dtype_of, edge_of, is_narrow
from xlaserve.importers.onnx.edges import widened
from xlaserve.importers.onnx.graph import (
    DEFAULT_LIMIT_BYTES,
    Attribute,
    Graph,
    GraphInput,
    Model,
    Node,
)
from xlaserve.importers.onnx.tables import as_constants
from xlaserve.tensors import DATATYPES, Tensor, datatype_of

OLDEST_OPSET, NEWEST_OPSET = 13, 28
"""Supported opsets of the standard operators. onnx upgrades older models to the oldest of these."""

_SCAN_CHANGED = 9
"""Before this opset Scan had a batch dimension."""

_PROTOBUF_LIMIT_BYTES = 2**31 - 1
_MAX_DEPTH = 16
"""Maximum nesting depth of graphs."""
_SHOWN_CHARACTERS = 200


def read(path: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES, roots: Roots = ANYWHERE) -> Model:
    """Read a model and its external data; raises InvalidModel."""
    limit = min(limit_bytes, _PROTOBUF_LIMIT_BYTES)
    data = files.read_checked(path.parent, path.name, limit_bytes=limit, roots=roots)
    return parse(bytes(data), External(path.parent, limit_bytes - len(data)))


def parse(data: bytes, external: "External | None" = None) -> Model:
    """Parse a serialized ModelProto; raises InvalidModel.

    Without `external`, all tensors must be in the ModelProto.
    """
    proto = ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise InvalidModel(f"not an ONNX model: {error}") from None
    if not proto.HasField("graph") or not proto.opset_import:
        raise InvalidModel("not an ONNX model: it lacks a graph or an opset")
    opset = _opset(proto)
    if proto.functions:
        inline = onnx.inliner.inline_local_functions
        proto = _by_onnx("its functions cannot be inlined", inline, proto)
    if opset < OLDEST_OPSET:
        proto = _upgraded(proto, opset)
    elif opset > NEWEST_OPSET:
        raise InvalidModel(
            f"the model has opset {opset}, expected {OLDEST_OPSET} to {NEWEST_OPSET}"
        )
    opsets = {_domain(item.domain): item.version for item in proto.opset_import}
    reader = _Reader(opsets, external or External(None, 0))
    read = reader.graph(proto.graph, frozenset(), 0)
    graph = as_constants(widened(read, opsets.get("", opset)))
    return Model(graph, opset, proto.producer_name)


def _opset(proto: ModelProto) -> int:
    found = [item.version for item in proto.opset_import if not _domain(item.domain)]
    return int(found[0]) if found else OLDEST_OPSET


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _upgraded(proto: ModelProto, opset: int) -> ModelProto:
    if opset < _SCAN_CHANGED and _has_scan(proto.graph):
        # onnx's converter would relabel it as a later Scan, which scans another axis.
        raise InvalidModel(f"a Scan of opset {opset} is not implemented; export it with 9 or later")
    problem = (
        f"the model has opset {opset}, which onnx cannot convert to {OLDEST_OPSET}; export it"
        f" with opset {OLDEST_OPSET} to {NEWEST_OPSET}"
    )
    return _by_onnx(
        problem, lambda model: onnx.version_converter.convert_version(model, OLDEST_OPSET), proto
    )


def _has_scan(proto: GraphProto) -> bool:
    return any(
        node.op_type == "Scan" or any(_has_scan(item.g) for item in node.attribute)
        for node in proto.node
    )


def _by_onnx(
    problem: str, change: Callable[[ModelProto], ModelProto], proto: ModelProto
) -> ModelProto:
    try:
        return change(proto)
    # onnx's C++ code raises various exception classes.
    except Exception as error:
        raise InvalidModel(f"{problem}: {str(error)[:_SHOWN_CHARACTERS]}") from error


# --- Graphs ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Reader:
    """Converts protobuf messages to plain data."""

    opsets: Mapping[str, int]
    external: "External"

    def graph(self, proto: GraphProto, outer: AbstractSet[str], depth: int) -> Graph:
        if depth > _MAX_DEPTH:
            raise InvalidModel(f"graphs are nested more than {_MAX_DEPTH} deep")
        if proto.sparse_initializer:
            raise InvalidModel("sparse initializers are not implemented")
        constants = {item.name: self.tensor(item) for item in proto.initializer}
        inputs = [item for item in proto.input if item.name not in constants]
        known = {*outer, *constants, *(item.name for item in inputs)}
        nodes = tuple(self._nodes(proto.node, known, depth))
        outputs = tuple(item.name for item in proto.output)
        for name in outputs:
            if name not in known:
                raise InvalidModel(f"no node computes the output '{name}'")
        given = tuple(item.name for item in inputs) if depth else ()
        read = () if depth else tuple(map(_input, inputs))
        return Graph(proto.name, read, outputs, nodes, MappingProxyType(constants), given)

    def _nodes(self, protos: Iterable[NodeProto], known: set[str], depth: int) -> Iterable[Node]:
        for proto in protos:
            node = self._node(proto, known, depth)
            for name in filter(None, node.inputs):
                if name not in known:
                    raise InvalidModel(f"{node} reads '{name}', which no earlier node computes")
            for name in filter(None, node.outputs):
                if name in known:
                    raise InvalidModel(f"{node} computes '{name}', which already exists")
                known.add(name)
            yield node

    def _node(self, proto: NodeProto, known: AbstractSet[str], depth: int) -> Node:
        domain = _domain(proto.domain)
        attributes = {item.name: self._attribute(item, known, depth) for item in proto.attribute}
        return Node(
            proto.op_type,
            domain,
            proto.name,
            tuple(proto.input),
            tuple(proto.output),
            self.opsets.get(domain, 0),
            MappingProxyType(attributes),
        )

    def _attribute(self, proto: AttributeProto, known: AbstractSet[str], depth: int) -> Attribute:
        if proto.type == AttributeProto.TENSOR:
            return self.tensor(proto.t)
        if proto.type == AttributeProto.GRAPH:
            return self.graph(proto.g, known, depth + 1)
        if proto.type not in _PLAIN_ATTRIBUTES:
            raise InvalidModel(f"attribute '{proto.name}' has a kind that is not implemented")
        return _PLAIN_ATTRIBUTES[proto.type](proto)

    def tensor(self, proto: TensorProto) -> Tensor:
        """Return a tensor, inline or from external data."""
        if any(size < 0 for size in proto.dims):
            raise InvalidModel(
                f"tensor '{proto.name}': expected sizes of 0 or more, got shape {list(proto.dims)}"
            )
        if proto.data_location == TensorProto.EXTERNAL:
            return self.external.tensor(proto)
        try:
            array = numpy_helper.to_array(proto)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise InvalidModel(f"tensor '{proto.name}' cannot be read: {error}") from error
        # Object arrays are reserved for symbolic dimensions.
        return array.astype(np.str_) if proto.data_type == STRING else array


_PLAIN_ATTRIBUTES: Mapping[int, Callable[[AttributeProto], Attribute]] = MappingProxyType(
    {
        AttributeProto.INT: lambda proto: proto.i,
        AttributeProto.FLOAT: lambda proto: proto.f,
        AttributeProto.STRING: lambda proto: proto.s.decode(errors="replace"),
        AttributeProto.INTS: lambda proto: tuple(proto.ints),
        AttributeProto.FLOATS: lambda proto: tuple(proto.floats),
        AttributeProto.STRINGS: lambda proto: tuple(
            item.decode(errors="replace") for item in proto.strings
        ),
    }
)


def _input(proto: onnx.ValueInfoProto) -> GraphInput:
    if not proto.type.HasField("tensor_type"):
        kind = (proto.type.WhichOneof("value") or "untyped").removesuffix("_type")
        raise InvalidModel(
            f"input '{proto.name}' is not a tensor but {kind}: export the model with a separate"
            " input for each tensor"
        )
    described = proto.type.tensor_type
    try:
        # Text inputs are rejected or converted on the host later, when their readers are known.
        is_text = described.elem_type == STRING
        dtype = None if is_text else any_dtype_of(described.elem_type)
        datatype = DATATYPES["BYTES"] if dtype is None else datatype_of(edge_of(dtype))
    except InvalidModel as error:
        raise InvalidModel(f"input '{proto.name}': {error}") from None
    assert datatype is not None
    if not described.HasField("shape"):
        raise InvalidModel(f"input '{proto.name}' has no shape, not even a dynamic one")
    shape = tuple(
        int(size.dim_value) if size.WhichOneof("value") == "dim_value" else str(size.dim_param)
        for size in described.shape.dim
    )
    # Some exporters write a dynamic dimension as 0 or -1.
    return GraphInput(
        proto.name,
        datatype,
        tuple("" if isinstance(s, int) and s < 1 else s for s in shape),
        described.elem_type if dtype is not None and is_narrow(dtype) else 0,
    )


# --- External data -----------------------------------------------------------------------------


@dataclass(slots=True)
class External:
    """Files next to a model that hold its large tensors."""

    directory: Path | None
    """Directory of the model's files; None if external data is not allowed."""
    limit_bytes: int
    read_bytes: int = field(default=0)
    """Total bytes read."""

    def tensor(self, proto: TensorProto) -> Tensor:
        """Read one tensor; raises InvalidModel for a path outside the directory."""
        entries = {item.key: item.value for item in proto.external_data}
        dtype = dtype_of(proto.data_type)
        size = math.prod(proto.dims) * dtype.itemsize
        what = f"the external data of tensor '{proto.name}'"
        offset, length = (
            _natural(what, entries.get(key, default))
            for key, default in (("offset", "0"), ("length", str(size)))
        )
        if length != size:
            raise InvalidModel(f"{what}: expected {size} bytes, got {length}")
        self.read_bytes += size
        if self.read_bytes > self.limit_bytes:
            raise InvalidModel(f"{what}: size exceeds the limit")
        data = self._bytes(what, entries.get("location", ""), offset, size)
        return np.frombuffer(data, dtype).reshape(tuple(proto.dims))

    def _bytes(self, what: str, location: str, offset: int, size: int) -> bytearray:
        path, root = self._confined(what, location)
        with files.opened(path.parent, path.name, limit_bytes=2**63, roots=Roots((root,))) as (
            file,
            total,
        ):
            if offset + size > total:
                raise InvalidModel(f"{what}: {location} ends before byte {offset + size}")
            file.seek(offset)
            return files.read_exactly(file, size, location)

    def _confined(self, what: str, location: str) -> tuple[Path, Path]:
        """Return the resolved path of a file in the model's directory, and that directory."""
        if self.directory is None:
            raise InvalidModel(f"{what} is in another file, but only the model file was given")
        parts = Path(location).parts
        root = self.directory.resolve()
        try:
            path = (root / location).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidModel(f"{what}: {error}") from error
        outside = Path(location).is_absolute() or ".." in parts or "\\" in location
        if not parts or outside or not path.is_relative_to(root):
            raise InvalidModel(f"{what} lies outside of the model's directory: '{location[:200]}'")
        return path, root


def _natural(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidModel(f"{what}: expected a number of bytes, got '{text[:32]}'")
    return int(text)
