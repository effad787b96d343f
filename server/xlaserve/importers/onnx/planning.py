"""Folds the constants of a graph; the rest becomes nodes, parameters and constants."""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import counted, operators
from xlaserve.importers.onnx.applying import apply
from xlaserve.importers.onnx.branches import inlined, without_constants
from xlaserve.importers.onnx.control import compute, is_control
from xlaserve.importers.onnx.datatypes import edge_of
from xlaserve.importers.onnx.graph import Graph, Node, needed, reads_of
from xlaserve.importers.onnx.operators.conversion import converted
from xlaserve.importers.onnx.operators.shape import is_for_one_row
from xlaserve.importers.onnx.sequences import NO_TENSORS, Absent, AnyValue, Counted, Sequenced
from xlaserve.importers.onnx.values import dimensions_of, is_host
from xlaserve.tensors import Tensor

OnNode: TypeAlias = Callable[[int, int], None]
"""Called with the number of the node being converted, and the number of nodes."""

_SMALL_BYTES = 1024
_FOLDED_BYTES = 2**20
"""Size up to which results are folded even if they are larger than their inputs."""


# JAX keeps weak references to functions that it traces.
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Plan:
    """A computation of outputs from parameters and inputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    parameters: dict[str, Tensor]
    """Tensors that become parameters of the export."""
    constants: Mapping[str, Tensor]
    """Tensors that become constants of the program: scalars, shapes, short lists of integers."""
    counted: Mapping[str, int] = field(default_factory=dict)
    """Row axis of each output with a data-dependent number of rows. Such an output is padded to its
    maximum size and followed by an output with the row count."""

    def __call__(
        self, parameters: Mapping[str, jax.Array], inputs: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Compute the outputs. Can be traced, also with symbolic dimensions."""
        values: dict[str, AnyValue] = {**self.constants, **parameters, **inputs}
        for node in self.nodes:
            values.update(compute(node, values))
        for name in self.counted:
            value = values[name]
            if isinstance(value, Counted):
                values[counted.count_name(name)] = value.count.reshape(1)
        return {name: _output(name, values[name]) for name in self.outputs}


def _output(name: str, value: AnyValue) -> jax.Array:
    if isinstance(value, Counted):
        value = counted.filled(value)
    if isinstance(value, Sequenced | Absent):
        raise InvalidModel(
            f"output '{name}' is a sequence or an optional, but the V2 protocol has only tensors:"
            " end the graph with its elements, or select other outputs with --output"
        )
    if is_host(value) and value.dtype.kind not in "biufV":
        raise InvalidModel(f"output '{name}' consists of dimensions or text, not numbers")
    return jnp.asarray(converted(value, edge_of(value.dtype)))


def plan(
    graph: Graph,
    arguments: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Sequence[str] = (),
    on_node: OnNode = lambda step, steps: None,
) -> Plan:
    """Trace a graph once, fold its constants, and return the rest; raises InvalidModel.

    `outputs` are the outputs to keep, by default all. `arguments` are the inputs with their shapes,
    which may have symbolic dimensions.
    """
    for name in outputs:
        if name not in graph.outputs:
            raise InvalidModel(f"unknown output '{name}', the model has {', '.join(graph.outputs)}")
    wanted = tuple(outputs) or graph.outputs
    planner = _Planner(dict(graph.constants), deque(needed(graph.nodes, wanted)), on_node, wanted)

    def trace(inputs: dict[str, jax.Array]) -> None:
        planner.run(inputs)

    jax.eval_shape(trace, dict(arguments))
    nodes = needed(planner.kept, wanted)
    used = {name for node in nodes for name in reads_of(node)}
    parameters = {name: planner.constants[name] for name in planner.parameters if name in used}
    constants = {
        name: value
        for name, value in planner.constants.items()
        if name not in parameters and (name in used or name in wanted)
    }
    named = _with_counts(wanted, planner.counted)
    return Plan(tuple(arguments), named, tuple(nodes), parameters, constants, planner.counted)


def _with_counts(outputs: Sequence[str], axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the outputs, with each padded output followed by its row count."""
    found = [
        item for name in outputs for item in (name, counted.count_name(name))[: 1 + (name in axes)]
    ]
    for name in axes:
        if found.count(counted.count_name(name)) > 1:
            raise InvalidModel(
                f"output '{name}' has a row count '{counted.count_name(name)}', but the model"
                " already has an output with that name: rename it"
            )
    return tuple(found)


@dataclass(slots=True)
class _Planner:
    """Processes the nodes of a graph within a JAX trace."""

    constants: dict[str, Tensor]
    waiting: deque[Node]
    on_node: OnNode
    wanted: Sequence[str]
    kept: list[Node] = field(default_factory=list)
    parameters: dict[str, None] = field(default_factory=dict)
    """Names of constants that become parameters, in order."""
    values: dict[str, AnyValue] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    """Row axis of each output with a data-dependent number of rows."""

    def run(self, inputs: Mapping[str, jax.Array]) -> None:
        self.values.update(inputs)
        done = 0
        while self.waiting:
            done += 1
            self.on_node(done, done - 1 + len(self.waiting))
            node = self.waiting.popleft()
            if is_control(node):
                self._controlled(node)
            elif not self._folded(node):
                self._traced(self._for_any_batch(node))
        found = {name: self.values.get(name) for name in self.wanted}
        self.counted = {n: value.axis for n, value in found.items() if isinstance(value, Counted)}
        # Tracers must not outlive their trace.
        self.values.clear()

    def _controlled(self, node: Node) -> None:
        """Inline the taken branch of an If with a known condition; otherwise trace the node."""
        name = node.inputs[0] if node.inputs else ""
        condition = self.constants.get(name, self.values.get(name))
        if node.operator == "If" and isinstance(condition, np.ndarray) and condition.size == 1:
            branch = node.graph("then_branch" if condition.item() else "else_branch")
            constants, nodes = inlined(node, branch)
            self.constants.update(constants)
            self.waiting.extendleft(reversed(needed(nodes, filter(None, node.outputs))))
            return
        constants, outside = without_constants(node)
        self.constants.update(constants)
        self._traced(outside)

    def _folded(self, node: Node) -> bool:
        """Compute a node whose inputs are constants; return False if it cannot be folded.

        Results that are too large are not folded.
        """
        if operators.find(node).takes_sequences:
            return False
        if not all(name in self.constants for name in filter(None, node.inputs)):
            return False
        arguments = [self.constants[name] if name else None for name in node.inputs]
        allowed = max(2 * sum(a.nbytes for a in arguments if a is not None), _FOLDED_BYTES)
        shapes = jax.eval_shape(lambda: _numbers(apply(node, arguments)))
        if sum(shape.size * shape.dtype.itemsize for shape in shapes) > allowed:
            return False
        with jax.ensure_compile_time_eval():
            for name, value in zip(node.outputs, apply(node, arguments), strict=False):
                self.constants[name] = (
                    counted.known(value) if isinstance(value, Counted) else np.asarray(value)
                )
        return True

    def _for_any_batch(self, node: Node) -> Node:
        """Make a Reshape that was exported for batch 1 keep a dynamic batch."""
        if node.operator != "Reshape" or node.domain or len(node.inputs) != 2:
            return node
        x, shape = self.values.get(node.inputs[0]), self.constants.get(node.inputs[1])
        if x is None or shape is None or isinstance(x, NO_TENSORS):
            return node
        if not is_for_one_row(x.shape, dimensions_of(shape)):
            return node
        name = f"{node.outputs[0]}/shape"
        self.constants[name] = np.asarray([0, *shape[1:]])
        return replace(node, inputs=(node.inputs[0], name))

    def _traced(self, node: Node) -> None:
        row = None if is_control(node) else operators.find(node)
        static = frozenset[int]() if row is None else row.static | row.preferred
        names = {node.inputs[position] for position in static if position < len(node.inputs)}
        read = {name: self._argument(name, static=name in names) for name in reads_of(node)}
        results = compute(node, read)
        known = {
            name: value
            for name, value in results.items()
            if isinstance(value, np.ndarray) and value.dtype != np.object_
        }
        self.constants.update(known)
        self.values.update(results)
        if len(known) < len(results):
            self.kept.append(node)

    def _argument(self, name: str, *, static: bool) -> AnyValue:
        constant = self.constants.get(name)
        if constant is None:
            return self.values[name]
        if static or is_small(constant):
            return constant
        self.parameters[name] = None
        # During planning only the shape matters.
        return jnp.zeros(constant.shape, constant.dtype)


def _numbers(values: Sequence[AnyValue]) -> list[jax.Array]:
    """Return the JAX arrays among the values; other values need little memory."""
    arrays = [value.rows if isinstance(value, Counted) else value for value in values]
    return [value for value in arrays if isinstance(value, jax.Array)]


def is_small(constant: Tensor) -> bool:
    """Tell whether a constant is embedded in the program instead of becoming a parameter."""
    integral = constant.dtype.kind not in "fV"
    return constant.size <= 1 or (integral and constant.nbytes <= _SMALL_BYTES)
