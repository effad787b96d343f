"""The clock of the wall is set now and then: what waits, ages or counts goes by another one.

Each use of it in the server is a row here, with what it is for, and what an hour too much or too
little does.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import xlaserve

ROOT = Path(xlaserve.__file__).parent
WALL = frozenset(
    {
        *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime"),
        *("datetime.now", "datetime.utcnow", "datetime.today", "date.today"),
        *("datetime.datetime.now", "datetime.datetime.utcnow", "time.CLOCK_REALTIME"),
        *("time.strftime", "time.asctime"),
    }
)
TOLD = "says when, to a person or in a log; nothing is compared with it"
FILES = "age of files, which have the clock of the wall alone; a whole day is the least age"
TOKENS = "exp and nbf of signed tokens are of the wall (RFC 7519 4.1.4), with leeway_seconds"

USES: Mapping[tuple[str, str], str] = {
    ("authoring/export.py", "Exportable.write"): TOLD,
    ("files/temporary.py", "_is_left"): FILES,
    ("http/connection/fast_path.py", "FastPath._write"): TOLD,
    ("http/connection/response_head.py", "response_head"): TOLD,
    ("http/connection/sending.py", "_begin"): TOLD,
    ("language/template_process.py", "environment"): TOLD,
    ("language/template_process.py", "confine"): "reads the time zone before the process is shut",
    ("offline/cache_contents.py", "chosen"): FILES,
    ("openai/routes.py", "OpenAiRoutes.complete"): TOLD,
    ("openai/routes.py", "OpenAiRoutes.chat"): TOLD,
    ("openai/routes.py", "OpenAiRoutes.respond"): TOLD,
    ("openai/response_answers.py", "ResponseWriter._ended"): TOLD,
    ("process/output_reader.py", "Records.write"): TOLD,
    ("residence/loading.py", "VersionLoader.load"): TOLD,
    ("runtime/programs/compilation_cache.py", "CompilationCache._prune"): FILES,
    ("serving/access/control.py", "AccessControl.__init__"): TOKENS,
    ("serving/answers.py", "Counting.__init__"): TOLD,
    ("serving/observability/access_log.py", "AccessLog.__init__"): TOLD,
    ("serving/observability/event_notes.py", "origin_now"): TOLD,
    ("serving/observability/event_notes.py", "EventNotes.__init__"): TOLD,
    ("serving/observability/events.py", "EventLog.__init__"): TOLD,
    ("serving/observability/opentelemetry.py", "OpenTelemetry.__init__"): TOLD,
    ("serving/observability/tracing.py", "Tracing._end_spans"): TOLD,
    ("workers/parent.py", "Supervisor._note"): TOLD,
}
"""What uses the clock of the wall, by file and function."""


def uses_of(tree: ast.AST, scope: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the functions that name the clock of the wall, each as often as it does."""
    for node in ast.iter_child_nodes(tree):
        inner = scope
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*scope, node.name)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL:
            yield ".".join(scope)
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from ("import" for name in node.names if f"time.{name.name}" in WALL)
        yield from uses_of(node, inner)


def test_every_use_of_the_clock_of_the_wall_is_known() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), use)
        for path in ROOT.rglob("*.py")
        for use in uses_of(ast.parse(path.read_text()))
    }

    assert set(USES) == found


@pytest.mark.parametrize(
    "text",
    [
        "import time\ndef f(): return time.time()",
        "import time\ndef f(clock=time.time): pass",
        "from time import time_ns",
        "from datetime import datetime\nclass A:\n    def f(self): datetime.now()",
    ],
)
def test_a_use_is_found(text: str) -> None:
    assert 1 == len([*uses_of(ast.parse(text))])
