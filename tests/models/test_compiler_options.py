"""The operator's options of XLA reach every program that a server executes on its devices."""

import ast
from collections.abc import Iterator
from pathlib import Path

import xlaserve
from xlaserve.runtime.programs.compilation import XlaOptions

SERVER = Path(xlaserve.__file__).parent

ELSEWHERE = {
    "runtime/programs/compilation.py": "where the options are given",
    "runtime/programs/compilers/child.py": "of the CPU, which has no options",
    "authoring/lowering.py": "an export tries what it has written, on the CPU",
    "offline/probe.py": "the probe of `xlaserve doctor`",
    "runtime/programs/trying.py": "a trial, on the CPU",
}
"""Modules that compile what JAX has lowered, and why each may."""


def _compile_lowered(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield calls of `compile` on what is lowered: on `.lower(...)`, or a name that says so."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        on = node.func.value
        is_lowering = isinstance(on, ast.Call) and ast.unparse(on.func).endswith(".lower")
        is_named = isinstance(on, ast.Name) and "lowered" in on.id
        if node.func.attr == "compile" and (is_lowering or is_named):
            yield node


def test_nothing_else_compiles_what_was_lowered() -> None:
    found = {
        str(path.relative_to(SERVER))
        for path in SERVER.rglob("*.py")
        if any(_compile_lowered(ast.parse(path.read_text())))
    }

    assert set(ELSEWHERE) == found


class _Lowered:
    def compile(self, *, compiler_options: object) -> object:
        return compiler_options


class _Site:
    def __init__(self, platform: str, count: int) -> None:
        self.platform = platform
        self.devices = range(count)


def test_a_program_for_gpus_is_given_the_options() -> None:
    options = XlaOptions(command_buffers=False, autotune_directory="kept")

    given = options.compiled(_Lowered(), _Site("cuda", 2))

    assert options.for_site("cuda", 2) == given
    assert {"xla_gpu_graph_min_graph_size", "xla_gpu_enable_latency_hiding_scheduler"} < set(given)
    assert options.compiled(_Lowered(), _Site("cpu", 1)) is None
