"""Mutations of a module's source: each is one small edit."""

import ast
import copy
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_SAID = frozenset({"_log", "log", "logger", "_logger", "logging", "warnings"})
"""Names whose calls only log or warn, and do not affect results."""
_TEXT = frozenset({"__repr__", "__str__"})
_LISTS = frozenset({"__all__", "__slots__"})
_Position: TypeAlias = tuple[int, int]


@dataclass(frozen=True, order=True)
class Mutation:
    """An edit that replaces the text between two positions (line from 1, byte from 0)."""

    start: _Position
    end: _Position
    kind: str
    replacement: str

    def applied(self, source: str) -> str:
        """Return the text with this edit."""
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        (first, begin), (last, end) = self.start, self.end
        before, after = lines[first - 1][:begin], lines[last - 1][end:]
        whole = [*lines[: first - 1], before + self.replacement.encode() + after, *lines[last:]]
        return b"".join(whole).decode()

    def diff(self, source: str, name: str) -> str:
        """Return the edit as a patch."""
        before, after = (text.splitlines(keepends=True) for text in (source, self.applied(source)))
        return "".join(difflib.unified_diff(before, after, name, name, n=2))


def mutations(source: str) -> Sequence[Mutation]:
    """Return every edit of a module that changes its program, in order."""
    found = _Finder()
    found.visit(ast.parse(source))
    return sorted(set(found.mutations))


class _Finder(ast.NodeVisitor):
    """Finds executed code to mutate, except annotations, decorators, logging and `__repr__`."""

    def __init__(self) -> None:
        self.mutations: list[Mutation] = []

    def _add(self, kind: str, node: ast.AST, replacement: str, last: ast.AST | None = None) -> None:
        first, end = _positions(node)[0], _positions(last or node)[1]
        self.mutations.append(Mutation(first, end, kind, replacement))

    def _replace(self, kind: str, node: ast.expr, other: ast.expr) -> None:
        self._add(kind, node, f"({ast.unparse(ast.fix_missing_locations(other))})")

    # --- Excluded nodes -----

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name not in _TEXT:
            for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
                self.visit(default)
            self._visit_all(node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all(node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(isinstance(one, ast.Name) and one.id in _LISTS for one in node.targets):
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip texts for people; before Python 3.12 their parts have no positions either."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions, which always hold."""

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # --- Expressions ---

    def visit_Compare(self, node: ast.Compare) -> None:
        for index, operator in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[index] = _COMPARISONS[type(operator)]()
            self._replace("comparison", node, other)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace("and, or", node, ast.BoolOp(swapped, node.values))
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            other = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
            self._replace("condition left out", node, other)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace("not left out", node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if (other := _ARITHMETIC.get(type(node.op))) is not None:
            self._replace("arithmetic", node, ast.BinOp(node.left, other(), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self._add("constant", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """Skip `strict` of a zip, which like an assertion always holds."""
        is_zip = isinstance(node.func, ast.Name) and node.func.id == "zip"
        self.visit(node.func)
        self._visit_all(node.args)
        self._visit_all([one for one in node.keywords if not (is_zip and one.arg == "strict")])

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        """Negate a condition that is a single value; other kinds have their own edits."""
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            self._replace("condition", test, ast.UnaryOp(ast.Not(), test))

    # --- Statements ---

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
            self.visit(node.test)
        self._visit_all((*node.body, *node.orelse))

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is None:
            return
        # A caller that tests the truth value cannot tell None from False; True has its own edit.
        if not (isinstance(value, ast.Constant) and (value.value is None or value.value is False)):
            self._add("nothing returned", node, "return None")
        self.visit(value)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call):
            if _root(value.func) not in _SAID:
                self._add("call left out", node, "pass")
                self.visit(value)
        elif not isinstance(value, ast.Constant):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("assignment left out", node, "pass")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        if "NotImplementedError" not in ast.unparse(node):
            self._add("error left out", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("break left out", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("continue left out", node, "pass")

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if not (isinstance(node.body[0], ast.Raise) and node.body[0].exc is None):
            self._add("error not handled", node.body[0], "raise", node.body[-1])
        self._visit_all(node.body)


def _positions(node: ast.AST) -> tuple[_Position, _Position]:
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _root(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute | ast.Call):
        function = function.value if isinstance(function, ast.Attribute) else function.func
    return function.id if isinstance(function, ast.Name) else ""
