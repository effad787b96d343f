"""The constant folding of a graph: nodes, parameters and constants that are left."""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.models.onnx import operators
from xlaserve.models.onnx.graph import Attribute, Graph, Node, reads_of
from xlaserve.models.onnx.operators.shape import is_for_one_row
from xlaserve.models.onnx.operators.table import Operator
from xlaserve.models.onnx.values import Value, dimensions_of, is_host, settled
from xlaserve.tensors import Tensor

OnNode: TypeAlias = Callable[[int, int], None]
"""Told which node is being converted, of how many."""

_SMALL_BYTES = 1024
_FOLDED_BYTES = 2**20
"""Most bytes of a constant that is computed beforehand, if that is more than its inputs."""


# JAX keeps weak references to what it traces.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Plan:
    """The computation of a graph's outputs from its inputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    parameters: dict[str, Tensor]
    """Arguments of what is exported."""
    constants: Mapping[str, Tensor]
    """Part of what is exported: numbers, shapes, short lists of integers."""

    def __call__(
        self, parameters: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Compute the outputs. May be traced, with symbolic dimensions too."""
        values: dict[str, Value] = {**self.constants, **parameters, **inputs}
        for node in self.nodes:
            results = apply(node, [values[name] if name else None for name in node.inputs])
            values.update(zip(node.outputs, results, strict=False))
        return {name: _output(name, values[name]) for name in self.outputs}


def _output(name: str, value: Value) -> jax.Array:
    if is_host(value) and value.dtype.kind not in "biufV":
        raise InvalidModel(f"output '{name}' is made of dimensions or text, not of numbers")
    return jnp.asarray(value)


def apply(node: Node, arguments: Sequence[Value | None]) -> list[Value]:
    """Compute one node; raises InvalidModel that names it."""
    row = operators.find(node)
    try:
        return _computed(row, node, arguments)
    except InvalidModel as error:
        raise InvalidModel(f"{node}: {error}") from error
    # Whatever JAX or numpy find wrong with a node, the author needs to know with which.
    except Exception as error:
        raise InvalidModel(f"{node}: {type(error).__name__}: {error}") from error


def _computed(row: Operator, node: Node, arguments: Sequence[Value | None]) -> list[Value]:
    for position, argument in enumerate(arguments):
        if position in row.static and argument is not None and not is_host(argument):
            raise InvalidModel(f"its input {position} depends on the data, and must not")
    found = row.operation(node, *arguments)
    if node.unread():
        raise InvalidModel(f"its attribute '{node.unread()[0]}' is not implemented")
    return [settled(value) for value in (found if isinstance(found, tuple | list) else [found])]


def plan(
    graph: Graph,
    arguments: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Sequence[str] = (),
    on_node: OnNode = lambda step, steps: None,
) -> Plan:
    """Trace a graph once, fold what is known, and return the rest; raises InvalidModel.

    `outputs` are those that are wanted, all if there is none. `arguments` are the inputs with
    their shapes, some of whose dimensions may be symbolic.
    """
    for name in outputs:
        if name not in graph.outputs:
            raise InvalidModel(f"there is no output '{name}', but {', '.join(graph.outputs)}")
    wanted = tuple(outputs) or graph.outputs
    planner = _Planner(dict(graph.constants), deque(needed(graph.nodes, wanted)), on_node)

    def trace(inputs: dict[str, jax.Array]) -> None:
        planner.run(inputs)

    jax.eval_shape(trace, dict(arguments))
    nodes = needed(planner.kept, wanted)
    used = {name for node in nodes for name in node.inputs}
    parameters = {name: planner.constants[name] for name in planner.parameters if name in used}
    constants = {
        name: value
        for name, value in planner.constants.items()
        if name not in parameters and (name in used or name in wanted)
    }
    return Plan(
        tuple(arguments),
        wanted,
        tuple(nodes),
        parameters,
        constants,
    )


def needed(nodes: Sequence[Node], outputs: Iterable[str]) -> list[Node]:
    """Return the nodes that the outputs depend on, without the outputs that nothing reads."""
    wanted = set(outputs)
    kept = []
    for node in reversed(nodes):
        used = tuple(name if name in wanted else "" for name in node.outputs)
        if any(used):
            kept.append(replace(node, outputs=used))
            wanted.update(reads_of(node))
    return kept[::-1]


@dataclass(slots=True)
class _Planner:
    """Walks the nodes of a graph while JAX traces."""

    constants: dict[str, Tensor]
    waiting: deque[Node]
    on_node: OnNode
    kept: list[Node] = field(default_factory=list)
    parameters: dict[str, None] = field(default_factory=dict)
    """The names of constants that become arguments, in order."""
    values: dict[str, Value] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, jax.Array]) -> None:
        self.values.update(inputs)
        done = 0
        while self.waiting:
            done += 1
            self.on_node(done, done - 1 + len(self.waiting))
            node = self.waiting.popleft()
            if node.operator == "If" and not node.domain:
                self._choose(node)
            elif not self._folded(node):
                self._traced(self._for_any_batch(node))
        # Nothing that was traced may outlive its trace.
        self.values.clear()

    def _choose(self, node: Node) -> None:
        """Replace an If by the branch that is taken."""
        condition = self.constants.get(node.inputs[0], self.values.get(node.inputs[0]))
        if condition is None or not is_host(condition) or condition.size != 1:
            raise InvalidModel(f"{node}: its condition depends on the data, and must not")
        branch = node.graph("then_branch" if condition.item() else "else_branch")
        constants, nodes = inlined(node, branch)
        self.constants.update(constants)
        self.waiting.extendleft(reversed(needed(nodes, filter(None, node.outputs))))

    def _folded(self, node: Node) -> bool:
        """Compute a node whose inputs are constants, unless the result would be too large."""
        if not all(name in self.constants for name in filter(None, node.inputs)):
            return False
        arguments = [self.constants[name] if name else None for name in node.inputs]
        allowed = max(2 * sum(a.nbytes for a in arguments if a is not None), _FOLDED_BYTES)
        shapes = jax.eval_shape(lambda: _numbers(apply(node, arguments)))
        if sum(shape.size * shape.dtype.itemsize for shape in shapes) > allowed:
            return False
        with jax.ensure_compile_time_eval():
            for name, value in zip(node.outputs, apply(node, arguments), strict=False):
                self.constants[name] = np.asarray(value)
        return True

    def _for_any_batch(self, node: Node) -> Node:
        """Let a Reshape that was written for a batch of 1 keep the open batch."""
        if node.operator != "Reshape" or node.domain or len(node.inputs) != 2:
            return node
        x, asked = self.values.get(node.inputs[0]), self.constants.get(node.inputs[1])
        if x is None or asked is None or not is_for_one_row(x.shape, dimensions_of(asked)):
            return node
        name = f"{node.outputs[0]}/shape"
        self.constants[name] = np.asarray([0, *asked[1:]])
        return replace(node, inputs=(node.inputs[0], name))

    def _traced(self, node: Node) -> None:
        static = operators.find(node).static
        arguments = [
            self._argument(name, static=position in static) if name else None
            for position, name in enumerate(node.inputs)
        ]
        results = dict(zip(node.outputs, apply(node, arguments), strict=False))
        known = {
            name: value
            for name, value in results.items()
            if is_host(value) and value.dtype != np.object_
        }
        self.constants.update(known)
        self.values.update(results)
        if len(known) < len(results):
            self.kept.append(node)

    def _argument(self, name: str, *, static: bool) -> Value:
        constant = self.constants.get(name)
        if constant is None:
            return self.values[name]
        if static or is_small(constant):
            return constant
        self.parameters[name] = None
        # Only its shape matters as yet.
        return jnp.zeros(constant.shape, constant.dtype)


def _numbers(values: Sequence[Value]) -> list[Value]:
    """Leave out what JAX has no arrays of; it is small."""
    return [value for value in values if not is_host(value)]


def is_small(constant: Tensor) -> bool:
    """Tell whether a constant is rather part of the program than one of its parameters."""
    integral = constant.dtype.kind not in "fV"
    return constant.size <= 1 or (integral and constant.nbytes <= _SMALL_BYTES)


# --- branches ----------------------------------------------------------------------------------


def inlined(node: Node, branch: Graph) -> tuple[dict[str, Tensor], list[Node]]:
    """Return the constants and nodes of a branch, with names of their own and the If's outputs.

    Branches of different nodes may use the same names inside.
    """
    prefix = f"{next(filter(None, node.outputs))}/"
    defined = {*branch.constants, *(name for inner in branch.nodes for name in inner.outputs)}
    names = {name: prefix + name for name in defined if name}
    nodes = [_renamed(inner, names) for inner in branch.nodes]
    for name, result in zip(node.outputs, branch.outputs, strict=True):
        if name:
            source = names.get(result, result)
            nodes.append(Node("Identity", "", "", (source,), (name,), node.opset, {}))
    return {names[name]: value for name, value in branch.constants.items()}, nodes


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    attributes: dict[str, Attribute] = {
        name: _renamed_graph(value, names) if isinstance(value, Graph) else value
        for name, value in node.attributes.items()
    }
    return replace(
        node,
        inputs=tuple(names.get(name, name) for name in node.inputs),
        outputs=tuple(names.get(name, name) for name in node.outputs),
        attributes=attributes,
    )


def _renamed_graph(graph: Graph, names: Mapping[str, str]) -> Graph:
    # A graph does not define again what it sees from outside.
    return replace(
        graph,
        nodes=tuple(_renamed(node, names) for node in graph.nodes),
        outputs=tuple(names.get(name, name) for name in graph.outputs),
    )
