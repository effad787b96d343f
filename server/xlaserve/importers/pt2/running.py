"""Runs a program's nodes on traced JAX arrays; errors name the node."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.pt2 import operators, symbolic
from xlaserve.importers.pt2.aliasing import Reference, is_in_place, referred
from xlaserve.importers.pt2.operators.table import Operation
from xlaserve.importers.pt2.program import (
    Described,
    Device,
    Graph,
    MemoryFormat,
    Names,
    Node,
    Read,
    Term,
)
from xlaserve.importers.pt2.values import NotComputed, as_array, is_open

_UNSEEN = frozenset(
    {"copy", "device", "layout", "memory_format", "non_blocking", "pin_memory", "requires_grad"}
)
"""Arguments about memory and gradients, which do not affect results."""

_ENABLED = "higher_order.wrap_with_set_grad_enabled"
_AUTOCAST = "higher_order.wrap_with_autocast"


@dataclass(frozen=True, slots=True)
class Runner:
    """Computes graphs, with a size limit for each value."""

    limit_bytes: int

    def run(self, graph: Graph, given: Mapping[str, Reference]) -> dict[str, Any]:
        """Return all values of a graph by name, given its inputs. Can be traced."""
        values: dict[str, Any] = dict(given)
        for node in graph.nodes:
            try:
                self._compute(node, values, graph.tensors)
            except InvalidModel as error:
                raise InvalidModel(f"{node}: {error}") from error
            # JAX and numpy may raise anything; the model's author needs to know which node it was.
            except Exception as error:
                text = str(error).strip().partition("\n")[0][:300]
                raise InvalidModel(f"{node}: {type(error).__name__}: {text}") from error
        return values

    def _compute(
        self, node: Node, values: dict[str, Any], described: Mapping[str, Described]
    ) -> None:
        arguments = {name or str(place): value for place, (name, value) in _read(node, values)}
        found = self._called(node, arguments)
        for name, value in _paired(node.results, found):
            if isinstance(value, Reference):
                self._check(name, value.read(), described.get(name))
            values[name] = value

    def _called(self, node: Node, arguments: dict[str, Any]) -> Any:
        if node.target in symbolic.ARITHMETIC:
            return symbolic.ARITHMETIC[node.target](*arguments.values())
        if node.target in (_ENABLED, _AUTOCAST):
            return self._nested(node, list(arguments.values()))
        if not node.target.startswith(operators.ATEN):
            operators.find(node.target)
        overload = node.target.removeprefix(operators.ATEN)
        name = overload.partition(".")[0]
        if name in _CHECKS:
            return _CHECKS[name](_plain(arguments))
        if is_in_place(name):
            return self._in_place(node, name, overload, arguments)
        return _applied(name, operators.find(node.target), arguments)

    def _in_place(
        self, node: Node, name: str, overload: str, arguments: dict[str, Any]
    ) -> Reference:
        """Compute the operator without its trailing `_`; write the result to the first argument."""
        target = next(iter(arguments.values()), None)
        if not isinstance(target, Reference):
            raise InvalidModel("it modifies something other than a tensor")
        if name in ("detach_", "requires_grad_"):
            return target
        pure = f"{operators.ATEN}{name[:-1]}{overload.removeprefix(name)}"
        operation = operators.find(pure)
        before, *others = _plain(list(arguments.values()))
        # In-place variants may name their first argument differently, for example `dropout_`.
        names = [next(iter(_parameters(operation))), *list(arguments)[1:]]
        found = _called(operation, dict(zip(names, [before, *others], strict=True)))
        if not isinstance(found, jax.Array) or str(found.shape) != str(before.shape):
            raise InvalidModel(f"it changes the shape {before.shape} in place")
        target.write(as_array(found, before.dtype), node)
        return target

    def _nested(self, node: Node, arguments: list[Any]) -> Any:
        """Run the subgraph of a wrapper that sets grad or autocast modes."""
        if node.target == _AUTOCAST and (len(arguments) < 4 or arguments[2] is not False):
            raise InvalidModel("autocast is not supported: export the model without it")
        place = next((i for i, a in enumerate(arguments) if isinstance(a, Graph)), None)
        if place is None:
            raise InvalidModel("it has no graph")
        graph, operands = arguments[place], arguments[place + 1 :]
        given = dict(zip(graph.inputs, operands, strict=True))
        values = self.run(graph, given)
        found = [resolved(term, values) for term in graph.outputs]
        return found[0] if graph.is_single else found

    def _check(self, name: str, value: jax.Array, described: Described | None) -> None:
        """Raise InvalidModel for a value that is too large or differs from PyTorch's record."""
        sizes = [size for size in value.shape if not is_open(size)]
        needed = math.prod(sizes) * value.dtype.itemsize
        if needed > self.limit_bytes:
            raise InvalidModel(
                f"'{name}' has {needed} bytes, more than the {self.limit_bytes} allowed"
            )
        if described is None:
            raise InvalidModel(f"the program does not describe '{name}'")
        expected = (described.dtype, len(described.sizes))
        if expected != (value.dtype, value.ndim) or not all(
            is_open(got) or isinstance(size, str) or size == got
            for size, got in zip(described.sizes, value.shape, strict=True)
        ):
            raise InvalidModel(
                f"'{name}' is {value.dtype} {list(map(str, value.shape))} here, but"
                f" {described.dtype} {list(map(str, described.sizes))} in PyTorch"
            )


def resolved(term: Term, values: Mapping[str, Any]) -> Any:
    """Return the value of an argument or an output."""
    if isinstance(term, Read):
        return values[term.name]
    if isinstance(term, tuple):
        return [resolved(item, values) for item in term]
    return term


def _read(node: Node, values: Mapping[str, Any]) -> list[tuple[int, tuple[str, Any]]]:
    return [
        (place, (name, resolved(term, values)))
        for place, (name, term) in enumerate(node.arguments)
        if not isinstance(term, Device | MemoryFormat)
    ]


def _plain(value: Any) -> Any:
    """Convert the tensors in an argument to arrays."""
    if isinstance(value, Reference):
        return value.read()
    if isinstance(value, NotComputed):
        raise InvalidModel("it uses a result that is only for the backward pass")
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _applied(name: str, operation: Operation, arguments: dict[str, Any]) -> Any:
    plain = _plain(arguments)
    result = _called(operation, plain)
    first = next(iter(arguments), None)
    source = arguments[first] if first is not None else None

    def compute(value: jax.Array) -> Any:
        return _called(operation, {**plain, str(first): value})

    if isinstance(result, jax.Array):
        given = source if isinstance(source, Reference) else None
        return referred(name, given, plain, result, compute)
    if isinstance(result, list) and all(isinstance(value, jax.Array) for value in result):
        given = source if isinstance(source, Reference) else None
        return referred(name, given, plain, result, compute)
    if isinstance(result, tuple):
        return [Reference.fresh(v) if isinstance(v, jax.Array) else v for v in result]
    return result


@cache
def _parameters(operation: Operation) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(operation).parameters


def _called(operation: Operation, arguments: Mapping[str, Any]) -> Any:
    """Call an operation; raises InvalidModel for an argument that it does not have."""
    known = _parameters(operation)
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise InvalidModel(f"its argument '{name}' is missing")
    kept = {}
    for name, value in arguments.items():
        if name in known:
            kept[name] = value
        elif name not in _UNSEEN and value is not None:
            raise InvalidModel(f"its argument '{name}' is not implemented")
    return operation(**kept)


def _paired(names: Names, found: Any) -> list[tuple[str, Any]]:
    """Return (name, value) pairs of results; raises InvalidModel if their numbers differ."""
    if names is None or names == ():
        return []
    if isinstance(names, str):
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if isinstance(found, list):
            raise InvalidModel(f"it has {len(found)} results, expected one")
        return [(names, found)]
    if not isinstance(found, list) or len(found) != len(names):
        raise InvalidModel(f"its results do not match its {len(names)} names")
    return [pair for name, value in zip(names, found, strict=True) for pair in _paired(name, value)]


# --- Assertions and sizes ----------------------------------------------------------------------


def _assert_metadata(arguments: Mapping[str, Any]) -> None:
    tensor, dtype = arguments["a"], arguments.get("dtype")
    if dtype is not None and np.dtype(dtype) != tensor.dtype:
        raise InvalidModel(f"expected {dtype}, got {tensor.dtype}")
    sizes = arguments.get("size")
    if sizes is not None and list(map(str, sizes)) != list(map(str, tensor.shape)):
        raise InvalidModel(f"expected the shape {list(sizes)}, got {list(tensor.shape)}")


def _assert_scalar(arguments: Mapping[str, Any]) -> None:
    condition = next(iter(arguments.values()))
    if isinstance(condition, jax.Array) or is_open(condition):
        raise InvalidModel("it is an assertion whose condition depends on data: export without it")
    if not condition:
        raise InvalidModel(str(arguments.get("assert_msg", "its condition does not hold"))[:200])


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "_assert_scalar": _assert_scalar,
    "_assert_tensor_metadata": _assert_metadata,
    "sym_constrain_range": lambda arguments: None,
    "sym_constrain_range_for_size": lambda arguments: None,
    "sym_numel": lambda arguments: symbolic.elements(**arguments),
    "sym_size": lambda arguments: symbolic.size(**arguments),
}
"""Nodes that check sizes, or return them as numbers."""


def outputs(
    values: Mapping[str, Any], named: Mapping[str, Term], wanted: Sequence[str]
) -> dict[str, jax.Array]:
    """Return a program's outputs; raises InvalidModel for an output that is not a tensor."""
    found = {}
    for name in wanted:
        value = resolved(named[name], values)
        if not isinstance(value, Reference):
            raise InvalidModel(
                f"output '{name}' is not a tensor but {type(value).__name__}: select other"
                " outputs with --output"
            )
        try:
            found[name] = value.read()
        except InvalidModel as error:
            raise InvalidModel(f"output '{name}': {error}") from error
    return found
