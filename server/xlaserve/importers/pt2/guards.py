"""Evaluates PyTorch's conditions on input sizes without running them as Python."""

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from xlaserve.errors import InvalidModel

MAX_CHARACTERS = 4000
MAX_BITS = 256
"""Limit on intermediate results, because short texts of nested powers give huge numbers."""
_MAX_EXPONENT = 8

_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
    }
)


def holds(guard: str, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Tell whether a condition holds for these input shapes.

    `L['x'].size()[0]` is the first size of the input x. Raises InvalidModel unless the condition
    consists of sizes, integers, arithmetic, comparisons, `and`, `or` and `not`.
    """
    refusal = InvalidModel(f"its condition on sizes cannot be read: {guard[:200]}")
    if len(guard) > MAX_CHARACTERS:
        raise refusal
    try:
        tree = ast.parse(guard, mode="eval").body
        found = _value(tree, shapes)
    except (SyntaxError, ValueError, RecursionError, MemoryError, IndexError, KeyError):
        raise refusal from None
    except ZeroDivisionError:
        return False
    return bool(found)


def _value(  # noqa: PLR0911, one for each kind of node
    node: ast.expr, shapes: Mapping[str, Sequence[int]]
) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left, shapes), _value(right, shapes)))
        case ast.BinOp(left, ast.Pow(), ast.Constant(value=int() as power)) if (
            0 <= power <= _MAX_EXPONENT
        ):
            return _bounded(_value(left, shapes) ** power)
        case ast.Compare(left, ops, rights) if all(type(op) in _BINARY for op in ops):
            values = [_value(item, shapes) for item in (left, *rights)]
            pairs = zip(values, ops, values[1:], strict=False)
            return all(_BINARY[type(op)](a, b) for a, op, b in pairs)
        case ast.BoolOp(op, values):
            results = [bool(_value(item, shapes)) for item in values]
            return all(results) if isinstance(op, ast.And) else any(results)
        case ast.UnaryOp(ast.Not(), operand):
            return not _value(operand, shapes)
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand, shapes)
        case ast.Subscript(
            ast.Call(ast.Attribute(source, "size" | "shape"), [], []),
            ast.Constant(value=int() as axis),
        ):
            return shapes["_".join(_path(source))][axis]
    raise ValueError(node)


def _bounded(value: int) -> int:
    if value.bit_length() > MAX_BITS:
        raise ValueError(value.bit_length())
    return value


def _path(node: ast.expr) -> list[str]:
    """Return the keys of an input: `x` of L['x'], `x` and `0` of L['x'][0]."""
    match node:
        case ast.Name("L"):
            return []
        case ast.Subscript(inner, ast.Constant(value=str() | int() as key)):
            return [*_path(inner), str(key)]
    raise ValueError(node)
