"""The process that renders chat templates: what a template takes of time and memory ends here.

Started by `templates.py` as a script of its own, which needs nothing of the server. It reads
messages and writes answers, each as its length in four bytes and then JSON, until its input ends.
Whoever got out of the sandbox within it could open no file and no socket, and start no process.
"""

import fcntl
import gc
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import jinja2
import jinja2.debug  # what it imports when a template fails, when no file can be opened any more
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SIZE = struct.Struct("!I")

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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_bytes
    for limit, value in (
        (resource.RLIMIT_AS, most),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def end_with(life: int) -> None:
    """Have the system kill this process once the other end of a pipe is closed.

    The server holds it; a process that renders, or is stopped, reads no end of its input.
    """
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    seen = select.poll()
    seen.register(life, 0)
    if seen.poll(0):  # it was closed before
        sys.exit(1)


def answer(render: Callable[[], str], cpu_seconds: float, most_bytes: int) -> dict[str, str]:
    """Return what a template gives, or why it gives nothing; a process that takes too long dies."""
    # What it does by default is to end the process, whatever that is busy with.
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        text = render()
        if len(text.encode(errors="surrogatepass")) > most_bytes:
            return {"failed": f"it writes more than {most_bytes} bytes"}
    except Refused as error:
        return {"refused": str(error)[:1000]}
    except MemoryError:
        return {"lost": "it takes more memory than it may"}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:1000]}"}
    else:
        return {"text": text}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def receive(stream: BinaryIO) -> Any:
    """Return the next message, None at the end."""
    head = stream.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    return json.loads(stream.read(SIZE.unpack(head)[0]))


def send(stream: BinaryIO, message: Any) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    stream.write(SIZE.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    """Compile the templates of the first message, then render with what each other one holds."""
    end_with(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = receive(source)
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

    send(sink, answer(compile_all, cpu_seconds, most_bytes))
    while (asked := receive(source)) is not None:
        template, given = compiled.get(asked["name"]), asked["given"]
        if template is None:
            return
        send(sink, answer(lambda t=template, g=given: t.render(g), cpu_seconds, most_bytes))  # type: ignore[misc]
        del asked, given
        gc.collect(0)


if __name__ == "__main__":
    main()
