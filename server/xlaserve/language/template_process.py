"""Subprocess that renders untrusted chat templates within limits of time and memory.

Started by `templates.py`; imports nothing else from the server. Reads messages and writes
answers until its input ends; each is a four-byte length followed by JSON. Code that escapes the
Jinja sandbox still cannot open files or sockets, or start processes.
"""

import gc
import json
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import jinja2
import jinja2.debug  # imported now for failing templates: later no files can be opened
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xlaserve.language import confining

_LOADING = (
    "{% macro m(a) %}{{ a|tojson }}{% endmacro %}{% for i in x %}{{ m('\\n' ~ i) }}{% endfor %}"
)
"""Rendered once to make Python import everything needed later, such as codecs."""

_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
"""Jinja functions that templates may call; not `lipsum`, which reads a file."""


class Refused(Exception):
    """The template rejected the messages with `raise_exception`."""


class GenerationTag(jinja2.ext.Extension):
    """The block tag `generation`, which marks answers for training and has no effect here."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> "list[jinja2.nodes.Node]":
        """Return the contents of the block."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def environment() -> ImmutableSandboxedEnvironment:
    """Return a sandboxed environment with the functions that chat templates expect."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, GenerationTag],
        cache_size=0,
    )
    made.globals = {name: made.globals[name] for name in _GLOBALS}
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape HTML characters.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: object) -> None:
    raise Refused(str(message))


def confine(memory_bytes: int) -> None:
    """Drop access to files, sockets and processes, and limit additional memory."""
    time.localtime()  # load the time zone while files are accessible
    environment().from_string(_LOADING).render(x=["'"])
    confining.confine(memory_bytes)


def answer(render: Callable[[], str], cpu_seconds: float, most_bytes: int) -> dict[str, str]:
    """Render, and return the text or the reason for the failure.

    The process is killed if it exceeds the CPU limit.
    """
    # The default action of SIGPROF kills the process, even inside native code.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        text = render()
        if len(text.encode()) > most_bytes:
            return {"failed": f"it writes more than {most_bytes} bytes"}
    except Refused as error:
        return {"refused": str(error)[:1000]}
    except UnicodeEncodeError:
        return {"failed": "it writes half of a surrogate pair"}
    except MemoryError:
        return {"lost": "it takes more memory than it may"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:1000]}"}
    else:
        return {"text": text}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Compile the templates in the first message, then render one per further message."""
    confining.end_with(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = confining.receive(source)
    if first is None:
        return
    made, limits = environment(), first["limits"]
    cpu_seconds, most_bytes = limits["cpu_seconds"], limits["output_bytes"]
    confine(limits["memory_bytes"])
    compiled: dict[str, jinja2.Template] = {}

    def compile_all() -> str:
        for name, text in first["sources"].items():
            compiled[name] = made.from_string(text)
        return ""

    confining.send(sink, answer(compile_all, cpu_seconds, most_bytes))
    while (asked := confining.receive(source)) is not None:
        template, given = compiled.get(asked["name"]), asked["given"]
        if template is None:
            return
        found = answer(partial(template.render, given), cpu_seconds, most_bytes)
        confining.send(sink, found)
        del asked, given, found
        gc.collect(0)


if __name__ == "__main__":
    main()
