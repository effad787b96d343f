"""Applies one operator to values; errors name the node."""

from collections.abc import Sequence

from xlaserve.errors import InvalidModel
from xlaserve.importers.onnx import counted, operators
from xlaserve.importers.onnx.graph import Node
from xlaserve.importers.onnx.operators.table import Operator
from xlaserve.importers.onnx.sequences import NO_TENSORS, AnyValue, Counted, tensor_of
from xlaserve.importers.onnx.values import is_host, settled


def apply(node: Node, arguments: Sequence[AnyValue | None]) -> list[AnyValue]:
    """Compute the outputs of one node; raises InvalidModel that names the node."""
    row = operators.find(node)
    try:
        return _computed(row, node, arguments)
    except InvalidModel as error:
        raise InvalidModel(f"{node}: {error}") from error
    # JAX and numpy may raise anything; the model's author needs to know which node it was.
    except Exception as error:
        raise InvalidModel(f"{node}: {type(error).__name__}: {error}") from error


def _computed(row: Operator, node: Node, arguments: Sequence[AnyValue | None]) -> list[AnyValue]:
    if any(isinstance(argument, Counted) for argument in arguments):
        passing = counted.through(node, arguments)
        (result,) = _computed(row, node, passing.unwrapped(arguments))
        return [passing.wrapped(tensor_of(result, "its result"))]
    for position, argument in enumerate(arguments):
        if argument is None:
            continue
        if not row.takes_sequences:
            argument = tensor_of(argument, f"its input {position}")  # noqa: PLW2901
        if position in row.static and not isinstance(argument, NO_TENSORS):
            check_known(argument, position)
    found = row.operation(node, *arguments)
    check_obeyed(node)
    results = found if isinstance(found, tuple | list) else [found]
    return [value if isinstance(value, NO_TENSORS) else settled(value) for value in results]


def check_known(argument: object, position: int) -> None:
    """Raise InvalidModel for an input whose elements are unknown during tracing."""
    if not is_host(argument):  # type: ignore[arg-type]
        raise InvalidModel(f"its input {position} must not depend on data")


def check_obeyed(node: Node) -> None:
    """Raise InvalidModel for an attribute that the operator did not read."""
    if node.unread():
        raise InvalidModel(f"its attribute '{node.unread()[0]}' is not implemented")
