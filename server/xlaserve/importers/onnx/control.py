"""Computes nodes, including those with subgraphs: If, Loop, Scan, SequenceMap.

Subgraphs can read values of the enclosing graphs. If the branch or the number of iterations is
known, a subgraph is traced inline; otherwise it becomes a `lax.cond`, `lax.while_loop` or
`lax.scan`.
"""

# Some of the JAX functions called here are untyped.
# mypy: disallow-untyped-calls=False

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import jax

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import loops
from xlaserve.importers.onnx.applying import apply, check_obeyed
from xlaserve.importers.onnx.graph import Graph, Node
from xlaserve.importers.onnx.loops import UNROLLED, Body, as_array, described
from xlaserve.importers.onnx.sequences import Absent, AnyValue, Sequenced, tensor_of
from xlaserve.importers.onnx.values import is_host, is_open, on_device, scalar_of

_Control: TypeAlias = Callable[
    [Node, Sequence[AnyValue | None], Callable[[str], Body]], Sequence[AnyValue]
]
"""Called with the node, its inputs, and a function that returns the body for a graph attribute."""


def is_control(node: Node) -> bool:
    """Tell whether a node has subgraphs."""
    return not node.domain and node.operator in CONTROL


def compute(
    node: Node, values: Mapping[str, AnyValue], allowance: int = UNROLLED
) -> dict[str, AnyValue]:
    """Compute a node and return its outputs by name.

    `values` has all values that are visible to the node. Raises InvalidModel that names the node.
    """
    given = [values[name] if name else None for name in node.inputs]
    results = _computed(node, given, values, allowance) if is_control(node) else apply(node, given)
    return {name: value for name, value in zip(node.outputs, results, strict=False) if name}


def run(
    graph: Graph, arguments: Sequence[AnyValue], values: Mapping[str, AnyValue], allowance: int
) -> list[AnyValue]:
    """Compute the outputs of a subgraph."""
    inner = {**values, **graph.constants, **dict(zip(graph.arguments, arguments, strict=True))}
    for node in graph.nodes:
        inner.update(compute(node, inner, allowance))
    return [inner[name] for name in graph.outputs]


def _computed(
    node: Node,
    given: Sequence[AnyValue | None],
    values: Mapping[str, AnyValue],
    allowance: int,
) -> Sequence[AnyValue]:
    def body(name: str) -> Body:
        return Body(node.graph(name), values, allowance, run)

    try:
        found = CONTROL[node.operator](node, given, body)
        check_obeyed(node)
    except InvalidModel as error:
        raise InvalidModel(f"{node}: {error}") from error
    # JAX may raise anything; the model's author needs to know which node it was.
    except Exception as error:
        raise InvalidModel(f"{node}: {type(error).__name__}: {error}") from error
    return found


def _loop(
    node: Node, given: Sequence[AnyValue | None], body: Callable[[str], Body]
) -> list[AnyValue]:
    return loops.loop(node, given, body("body"))


def _scan(
    node: Node, given: Sequence[AnyValue | None], body: Callable[[str], Body]
) -> list[AnyValue]:
    return loops.scan(node, given, body("body"))


# --- If ----------------------------------------------------------------------------------------


def _if(
    node: Node, given: Sequence[AnyValue | None], body: Callable[[str], Body]
) -> list[AnyValue]:
    """Compute one of two branches. With a data-dependent condition, both need the same shapes."""
    condition = tensor_of(given[0] if given[0] is not None else Absent(), "its condition")
    wanted = [place for place in range(len(node.outputs)) if node.needs(place)]
    branches = [body(name).keeping(wanted) for name in ("then_branch", "else_branch")]
    if is_host(condition):
        found: Sequence[AnyValue] = branches[0 if scalar_of(condition) else 1](())
    elif any(is_open(size) or size != 1 for size in condition.shape):
        raise InvalidModel(
            f"its condition: expected one element for all rows of a batch, got the shape"
            f" {list(condition.shape)}"
        )
    else:
        found = _either(
            on_device(condition).reshape(()), branches, [node.outputs[p] for p in wanted]
        )
    results: list[AnyValue] = [Absent()] * len(node.outputs)
    for place, value in zip(wanted, found, strict=True):
        results[place] = value
    return results


def _either(
    condition: jax.Array, branches: Sequence[Body], names: Sequence[str]
) -> list[jax.Array]:
    seen: list[list[jax.Array]] = []

    def traced(branch: Body) -> Callable[[], list[jax.Array]]:
        def computed() -> list[jax.Array]:
            arrays = [
                as_array(value, f"its output '{name}', of a data-dependent branch,")
                for name, value in zip(names, branch(()), strict=True)
            ]
            seen.append(arrays)
            for name, first, other in zip(names, seen[0], arrays, strict=True):
                if (first.shape, first.dtype) != (other.shape, other.dtype):
                    raise InvalidModel(
                        f"its condition depends on data, and its output '{name}' is "
                        f"{described(first)} of one branch and {described(other)} of the other:"
                        " XLA needs equal shapes"
                    )
            return arrays

        return computed

    found: list[jax.Array] = jax.lax.cond(condition, *map(traced, branches))
    return found


# --- SequenceMap -------------------------------------------------------------------------------


def _sequence_map(
    node: Node, given: Sequence[AnyValue | None], body: Callable[[str], Body]
) -> list[AnyValue]:
    """Apply the body to the items of one or several sequences of equal length."""
    first, *others = given
    if not isinstance(first, Sequenced):
        raise InvalidModel("its first input is not a sequence")
    lengths = {len(value.items) for value in given if isinstance(value, Sequenced)}
    if len(lengths) != 1:
        raise InvalidModel(f"its sequences have different lengths: {sorted(lengths)}")
    (length,) = lengths
    unrolled = body("body").unrolled(length)
    rows = [
        unrolled([first.items[place], *(_item(value, place) for value in others)])
        for place in range(length)
    ]
    columns = zip(*rows, strict=True) if rows else [()] * len(node.outputs)
    return [Sequenced(tuple(tensor_of(v, "an item") for v in column)) for column in columns]


def _item(value: AnyValue | None, place: int) -> AnyValue:
    if isinstance(value, Sequenced):
        return value.items[place]
    return Absent() if value is None else value


CONTROL: Mapping[str, _Control] = MappingProxyType(
    {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}
)
"""Operators with subgraphs."""
