"""The process that renders chat templates, with limits of time and memory.

Started by `templates.py` as a script of its own, which needs nothing of the server. It reads
messages and writes answers, each as its length in four bytes and then JSON, until its input ends.
Whoever got out of the sandbox within it could open no file and no socket, and start no process.
"""

import gc
import json
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.debug  # imports for a failing template: later, no file can be opened
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from xlaserve.language import confining
else:
    sys.path.append(str(Path(__file__).parent))
    import confining

_LOADING = (
    "{% macro m(a) %}{{ a|tojson }}{% endmacro %}{% for i in x %}{{ m('\\n' ~ i) }}{% endfor %}"
)
"""A template that has Python load what the others need, codecs above all."""

_GLOBALS = ("range", "dict", "namespace", "cycler", "joiner")
"""The functions of jinja2 that templates may call; its random text is read from a file."""


class Refused(Exception):
    """A template says by `raise_exception` that it takes no such messages."""


class GenerationTag(jinja2.ext.Extension):
    """The block `generation`, which marks answers for training, and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> "list[jinja2.nodes.Node]":
        """Return what is within the block."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox with what chat templates expect to be there."""
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
    # Not as jinja2 does it, which escapes what HTML would take for its own.
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
    """Take away what rendering does not need: files, sockets, processes, and memory beyond this."""
    time.localtime()  # reads the time zone, as long as it may
    environment().from_string(_LOADING).render(x=["'"])
    confining.confine(memory_bytes)


def answer(render: Callable[[], str], cpu_seconds: float, most_bytes: int) -> dict[str, str]:
    """Return what a template gives, or why it gives nothing; a process that takes too long dies."""
    # What it does by default is to end the process, whatever that is busy with.
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
    """Compile the templates of the first message, then render with what each other one holds."""
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
