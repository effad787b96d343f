"""Parses the JSON of torch.export; unsupported fields and values are errors."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import UnsetType

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2 import schema
from xlaserve.importers.pt2.datatypes import STRIDED, dtype_of
from xlaserve.importers.pt2.program import (
    Described,
    Device,
    Graph,
    MemoryFormat,
    Names,
    Node,
    Program,
    Read,
    Stored,
    Term,
    reads_of,
)
from xlaserve.importers.pt2.result_names import result_names

_ATEN_OPSET = 10
_VERIFIERS = ("TRAINING", "ATEN")
_SHOWN = 200
_SYMBOL = re.compile(r"Symbol\('(\w+)'(?:, \w+=(?:True|False))*\)")
_NUMBERS = MappingProxyType({"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan})
_PREFIX = "torch.ops."


def parse(data: bytes | memoryview) -> Program:
    """Parse a model's JSON; raises InvalidModel that names the fault."""
    try:
        read = msgspec.json.decode(data, type=schema.ExportedProgram)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidModel(f"the program cannot be read: {str(error)[:_SHOWN]}") from None
    except RecursionError:
        raise InvalidModel("the program is nested too deeply") from None
    _check_versions(read)
    module = read.graph_module
    graph = _graph(module.graph)
    stored, inputs = _inputs(module.signature, graph)
    return Program(
        graph,
        stored,
        inputs,
        _outputs(module, graph),
        {name: _range(name, found) for name, found in read.range_constraints.items()},
        tuple(read.guards_code),
        read.torch_version,
    )


def _check_versions(read: schema.ExportedProgram) -> None:
    version = read.schema_version
    if version.major != schema.MAJOR:
        raise InvalidModel(
            f"the program has schema {version.major}.{version.minor} (PyTorch "
            f"{read.torch_version}), expected {schema.MAJOR}: export it with PyTorch 2.9 or newer"
        )
    for name, opset in read.opset_version.items():
        if (name, opset) != ("aten", _ATEN_OPSET):
            raise InvalidModel(f"opset '{name}' {opset}: expected only 'aten' {_ATEN_OPSET}")
    for verifier in read.verifiers:
        if verifier not in _VERIFIERS:
            raise InvalidModel(
                f"the program has the dialect '{verifier}', expected {' or '.join(_VERIFIERS)}"
            )


def _range(symbol: str, found: schema.Range) -> tuple[int, int | None]:
    least, most = found.min_val or 0, found.max_val
    if most is not None and most < max(least, 1):
        raise InvalidModel(f"symbol '{symbol}' has the range {least} to {most}, which is empty")
    return least, most


# --- Graphs ------------------------------------------------------------------------------------


def _graph(read: schema.Graph) -> Graph:
    if read.custom_obj_values:
        name = next(iter(read.custom_obj_values))
        raise InvalidModel(f"'{name}' is a C++ object, stored as a pickle")
    inputs = tuple(_input_name(argument) for argument in read.inputs)
    known: set[str] = set()
    for name in filter(None, inputs):
        _define(name, known, "input")
    nodes = tuple(_nodes(read.nodes, known))
    outputs = tuple(_term("an output", argument) for argument in read.outputs)
    for name in reads_of(outputs):
        if name not in known:
            raise InvalidModel(f"no node computes the output '{name}'")
    tensors = {name: _described(name, meta) for name, meta in read.tensor_values.items()}
    return Graph(inputs, nodes, outputs, MappingProxyType(tensors), read.is_single_tensor_return)


def _input_name(argument: schema.Argument) -> str:
    """Return the name of an input; empty if the export made it a constant."""
    term = _term("an input", argument)
    return term.name if isinstance(term, Read) else ""


def _define(name: str, known: set[str], what: str) -> None:
    if name in known:
        raise InvalidModel(f"{what} computes '{name}', which already exists")
    known.add(name)


def _nodes(nodes: Sequence[schema.Node], known: set[str]) -> Iterator[Node]:
    for read in nodes:
        target = read.target.removeprefix(_PREFIX)
        what = f"node '{read.name or target}' ({target})"
        arguments = tuple((item.name, _term(what, item.arg)) for item in read.inputs)
        for name in reads_of([term for _, term in arguments]):
            if name not in known:
                raise InvalidModel(f"{what} reads '{name}', which no earlier node computes")
        found = tuple(_names(what, argument) for argument in read.outputs)
        results: Names = found[0] if len(found) == 1 else found
        for name in _flat(results):
            _define(name, known, what)
        shown = read.name or next(_flat(results), target)
        yield Node(target, arguments, results, shown)


def _flat(names: Names) -> Iterator[str]:
    if isinstance(names, str):
        yield names
    elif names is not None:
        for item in names:
            yield from _flat(item)


def _names(what: str, argument: schema.Argument) -> Names:
    return _names_of(what, _term(what, argument))


def _names_of(what: str, term: Term) -> Names:
    if term is None:
        return None
    if isinstance(term, Read):
        return term.name
    if isinstance(term, tuple):
        return tuple(_names_of(what, item) for item in term)
    raise InvalidModel(f"{what}: one of its results has no name")


def _described(name: str, meta: schema.TensorMeta) -> Described:
    if meta.layout != STRIDED:
        raise InvalidModel(f"tensor '{name}' has layout {meta.layout}, expected a strided one")
    try:
        dtype = dtype_of(meta.dtype)
    except InvalidModel as error:
        raise InvalidModel(f"tensor '{name}': {error}") from None
    return Described(dtype, tuple(_size(f"tensor '{name}'", size) for size in meta.sizes))


def _size(what: str, size: schema.SymInt) -> int | str:
    if not isinstance(size.as_int, UnsetType):
        if not isinstance(size.as_expr, UnsetType) or size.as_int < 0:
            raise InvalidModel(
                f"{what}: expected a size of 0 or more, or an expression, got {size.as_int}"
            )
        return size.as_int
    if isinstance(size.as_expr, UnsetType):
        raise InvalidModel(f"{what} has a size that is neither a number nor an expression")
    found = _SYMBOL.fullmatch(size.as_expr.expr_str)
    return found[1] if found else size.as_expr.expr_str


# --- Arguments ---------------------------------------------------------------------------------


def _term(what: str, argument: schema.Argument) -> Term:
    kind = _kind(what, argument)
    read = _TERMS.get(kind)
    if read is None:
        raise InvalidModel(f"{what}: an argument of the kind '{kind}' is not implemented")
    return read(what, getattr(argument, kind))


def _kind(what: str, union: msgspec.Struct) -> str:
    found = schema.present(union)
    if len(found) != 1:
        raise InvalidModel(f"{what}: expected one field of a union, got {found or 'none'}")
    return found[0]


def _number(what: str, value: float | str) -> float:
    if isinstance(value, str):
        if value not in _NUMBERS:
            raise InvalidModel(f"{what}: expected a number, got '{value[:_SHOWN]}'")
        return _NUMBERS[value]
    return value


def _symbolic(what: str, value: Any) -> Term:
    """Return a constant, or a reference to a computed number."""
    kind = _kind(what, value)
    found: Term = getattr(value, kind)
    return Read(str(found)) if kind == "as_name" else found


def _optional(what: str, value: schema.OptionalTensor) -> Term:
    return None if _kind(what, value) == "as_none" else _tensor(what, value.as_tensor)


def _tensor(_: str, value: Any) -> Term:
    return Read(value.name)


def _plain(_: str, value: Term) -> Term:
    return value


def _layout(what: str, number: int) -> Term:
    if number != STRIDED:
        raise InvalidModel(f"{what}: layout {number}, expected a strided one")
    return None


def _dtype(what: str, number: int) -> Term:
    try:
        return dtype_of(number)
    except InvalidModel as error:
        raise InvalidModel(f"{what}: {error}") from None


def _listed(read: Callable[[str, Any], Term]) -> Callable[[str, Any], Term]:
    return lambda what, values: tuple(read(what, value) for value in values)


_TERMS: Mapping[str, Callable[[str, Any], Term]] = MappingProxyType(
    {
        "as_none": lambda what, value: None,
        "as_tensor": _tensor,
        "as_tensors": _listed(_tensor),
        "as_int": _plain,
        "as_ints": _listed(_plain),
        "as_float": _number,
        "as_floats": _listed(_number),
        "as_string": _plain,
        "as_strings": _listed(_plain),
        "as_sym_int": _symbolic,
        "as_sym_ints": _listed(_symbolic),
        "as_scalar_type": _dtype,
        "as_memory_format": lambda what, value: MemoryFormat(value),
        "as_layout": _layout,
        "as_device": lambda what, value: Device(value.type),
        "as_bool": _plain,
        "as_bools": _listed(_plain),
        "as_sym_bool": _symbolic,
        "as_sym_bools": _listed(_symbolic),
        "as_graph": lambda what, value: _graph(value.graph),
        "as_optional_tensors": _listed(_optional),
        "as_sym_float": _symbolic,
        "as_sym_floats": _listed(_symbolic),
        "as_optional_tensor": _optional,
        "as_int_lists": _listed(_listed(_plain)),
        "as_float_lists": _listed(_listed(_plain)),
    }
)
"""Parsers by kind of argument; C++ objects, complex numbers and operators are not supported."""


# --- Signature ---------------------------------------------------------------------------------

_STORED = MappingProxyType(
    {
        "parameter": "parameter_name",
        "buffer": "buffer_name",
        "tensor_constant": "tensor_constant_name",
    }
)


def _inputs(
    signature: schema.Signature, graph: Graph
) -> tuple[Mapping[str, Stored], tuple[str, ...]]:
    """Return the module's tensors by graph input, and the names of the caller's inputs."""
    specs = signature.input_specs
    if len(specs) != len(graph.inputs):
        raise InvalidModel(
            f"the signature has {len(specs)} inputs, but the graph has {len(graph.inputs)}"
        )
    stored: dict[str, Stored] = {}
    given: list[str] = []
    for spec, name in zip(specs, graph.inputs, strict=True):
        kind = _kind("the signature", spec)
        found = getattr(spec, kind)
        if kind in _STORED:
            if found.arg.name != name:
                raise InvalidModel(
                    f"an input is '{found.arg.name}' in the signature, but '{name}' in the graph"
                )
            stored[name] = Stored(kind.replace("_", " "), getattr(found, _STORED[kind]))
        elif kind == "user_input":
            _check_given(found.arg, name, graph, given)
        elif kind != "constant_input":
            raise InvalidModel(f"an input of the kind '{kind}' is not implemented")
    return MappingProxyType(stored), tuple(given)


def _check_given(argument: schema.Argument, name: str, graph: Graph, given: list[str]) -> None:
    term = _term("an input", argument)
    if not isinstance(term, Read):
        if isinstance(term, int | float | str | None):
            return  # a constant argument, which the graph does not read
        raise InvalidModel("an input is a list, expected a tensor")
    if term.name != name or term.name not in graph.tensors:
        raise InvalidModel(
            f"input '{term.name}' is not a tensor: export the model with a constant or a tensor"
            " instead"
        )
    given.append(name)


def _outputs(module: schema.GraphModule, graph: Graph) -> Mapping[str, Term]:
    specs = module.signature.output_specs
    if len(specs) != len(graph.outputs):
        raise InvalidModel(
            f"the signature has {len(specs)} outputs, but the graph has {len(graph.outputs)}"
        )
    terms: list[Term] = []
    for spec, term in zip(specs, graph.outputs, strict=True):
        kind = _kind("the signature", spec)
        if kind != "user_output":
            raise InvalidModel(_not_returned(kind, getattr(spec, kind)))
        if _term("an output", getattr(spec, kind).arg) != term:
            raise InvalidModel("the outputs of the signature and the graph differ")
        terms.append(term)
    names = result_names(_out_spec(module), _fields(module))
    if len(names) != len(terms):
        raise InvalidModel(f"its out_spec has {len(names)} outputs, and the graph {len(terms)}")
    return MappingProxyType(
        {name: term for name, term in zip(names, terms, strict=True) if term is not None}
    )


def _not_returned(kind: str, spec: Any) -> str:
    if "mutation" in kind:
        named = [name for name in spec.__struct_fields__ if name.endswith("_name")]
        what = kind.removesuffix("_mutation").replace("user_", "").replace("_", " ")
        return (
            f"the program changes its {what} '{getattr(spec, named[0])}', but a served model"
            " keeps no state between requests"
        )
    return f"an output of the kind '{kind}' is not implemented"


def _out_spec(module: schema.GraphModule) -> str:
    for entry in module.module_call_graph:
        if not entry.fqn and entry.signature is not None:
            return entry.signature.out_spec
    raise InvalidModel("the program does not describe the structure of its outputs")


def _fields(module: schema.GraphModule) -> Mapping[str, Sequence[str]]:
    return {name: found.field_names for name, found in module.treespec_namedtuple_fields.items()}
