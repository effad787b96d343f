"""Chat templates, rendered by a process of their own that is ended when one takes too much."""

import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from xlaserve.errors import InvalidModel
from xlaserve.language import files
from xlaserve.language_errors import MessagesRefused, TemplateFailed, TextNotInstalled
from xlaserve.silence import Stopped, is_stopped

_SCRIPT = Path(__file__).with_name("template_process.py")
_SIZE_BYTES = 4
_ENCODER = msgspec.json.Encoder()
_LOOK_SECONDS = 0.25
"""Between two looks whether a process that is asked can answer."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates; a model may have one for messages with tools."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """The most that one rendering may take."""

    cpu_seconds: float = 2.0
    memory_bytes: int = 256 << 20
    """Beyond what the process has before it reads the template."""
    output_bytes: int = 32 << 20
    seconds: float = 30.0
    """On the clock: more than of the processor, which it shares."""


LIMITS = TemplateLimits()


def sources(config: Mapping[str, Any], file: str | None) -> Mapping[str, str]:
    """Return the templates of a model by name, none where it has none; raises InvalidModel."""
    found = file if file is not None else config.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {DEFAULT: found}
    listed = found if isinstance(found, list) else [found]
    named: dict[str, str] = {}
    for one in listed:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidModel(
                f"{files.CONFIG}: expected chat_template as text, or as a list of templates with "
                "'name' and 'template'"
            )
        named[name] = text
    return named


class Template:
    """The chat template of a model. Its methods may be called in any thread."""

    def __init__(
        self,
        found: Mapping[str, str],
        variables: Mapping[str, Any],
        model: str = "",
        limits: TemplateLimits = LIMITS,
    ) -> None:
        """`variables` are what it knows beside messages and tools. Raises TextNotInstalled."""
        if find_spec("jinja2") is None:
            raise TextNotInstalled(model, "jinja2")
        self._sources = found
        self._variables = variables
        self._model = model
        self._limits = limits
        self._rendering = threading.Lock()
        """Held while the process is asked: it renders one after the other."""
        self._process: _Process | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        marked: Callable[[Any], Any] = lambda data: data,
    ) -> str:
        """Return the text of messages, up to where an answer begins. Blocks.

        What `marked` makes of messages and tools is what the template is given. Raises
        MessagesRefused and TemplateFailed.
        """
        name = self._name(has_tools=bool(tools))
        try:
            given = {
                **self._variables,
                "messages": marked(list(messages)),
                "tools": marked(list(tools)) if tools else None,
                "documents": None,
                "add_generation_prompt": True,
            }
            asked = _ENCODER.encode({"name": name, "given": given})
        except (ValueError, TypeError, RecursionError) as error:
            raise MessagesRefused(self._model, f"they are no JSON: {error}") from None
        with self._rendering:
            found = self._ask(asked)
        if "refused" in found:
            raise MessagesRefused(self._model, found["refused"])
        if "text" not in found:
            raise TemplateFailed(self._model, found.get("failed") or found["lost"])
        return found["text"]

    @property
    def source_with_tools(self) -> str:
        """Return the text of the template that messages with tools have."""
        return self._sources[self._name(has_tools=True)]

    def _name(self, *, has_tools: bool) -> str:
        name = WITH_TOOLS if has_tools and WITH_TOOLS in self._sources else DEFAULT
        return name if name in self._sources else min(self._sources)

    def close(self) -> None:
        """End the process, after what it renders; another is started when it is needed."""
        with self._rendering:
            self._end()

    def _ask(self, asked: bytes, *, is_second: bool = False) -> Mapping[str, str]:
        has_failed = True
        try:
            process = self._process
            if process is not None and is_stopped(process.pid):
                self._end()
                process = None
            if process is None:
                process = self._process = _Process(self._limits)
                first = {"sources": self._sources, "limits": asdict(self._limits)}
                if "text" not in (found := process.ask(_ENCODER.encode(first))):
                    return found
            found = process.ask(asked)
        except _WasStopped:
            if is_second:
                raise TemplateFailed(self._model, "its process is stopped (SIGSTOP)") from None
            self._end()
            found = self._ask(asked, is_second=True)
            has_failed = False
            return found
        except (OSError, msgspec.DecodeError) as error:
            raise TemplateFailed(self._model, f"its process was lost: {error}") from None
        except _TookTooMuch as error:
            raise TemplateFailed(self._model, str(error)) from None
        else:
            # What has run out of memory may have left anything behind.
            has_failed = "lost" in found
            return found
        finally:
            if has_failed:
                self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end()


class _TookTooMuch(Exception):
    """A template has used up a limit, and its process has ended."""


class _WasStopped(Exception):
    """Somebody has stopped the process, and another one can do the same."""


class _Process:
    """One process, which is ended at the latest when nothing refers to it any more."""

    def __init__(self, limits: TemplateLimits) -> None:
        """Start it; raises OSError."""
        self._limits = limits
        # Nothing is ever written to it: it closes with this process, whatever ends that.
        life, held = os.pipe()
        try:
            self._process = self._started(life)
        except OSError:
            os.close(held)
            raise
        finally:
            os.close(life)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self.end = weakref.finalize(self, _end, self._process, held)
        """Kills it, once; it holds nothing that could be lost."""

    def _started(self, life: int) -> "subprocess.Popen[bytes]":
        # Nothing of the server's environment: its secrets are no business of a template.
        return subprocess.Popen(
            [sys.executable, "-s", "-P", "-X", "utf8", str(_SCRIPT), str(life)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            cwd="/",
            bufsize=0,
            pass_fds=[life],
            start_new_session=True,
        )

    def ask(self, message: bytes) -> Mapping[str, str]:
        """Send a message, and return the answer. Raises OSError and _TookTooMuch."""
        until = time.monotonic() + self._limits.seconds
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        rest = memoryview(len(message).to_bytes(_SIZE_BYTES, "big") + message)
        while rest:
            self._wait(until, stdin.fileno(), select.POLLOUT)
            rest = rest[os.write(stdin.fileno(), rest) :]
        size = int.from_bytes(self._read(stdout.fileno(), _SIZE_BYTES, until), "big")
        # JSON may write a byte as six, and a character as twelve.
        if size > 8 * self._limits.output_bytes:
            raise _TookTooMuch(f"it writes more than {self._limits.output_bytes} bytes")
        found: dict[str, str] = msgspec.json.decode(self._read(stdout.fileno(), size, until))
        return found

    def _read(self, file: int, count: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait(until, file, select.POLLIN)
            more = os.read(file, min(count - len(data), 1 << 20))
            if not more:
                seconds = self._limits.cpu_seconds
                raise _TookTooMuch(
                    f"its process ended: it may take {seconds:g} seconds of the processor and "
                    f"{self._limits.memory_bytes} bytes of memory"
                )
            data += more
        return bytes(data)

    def _wait(self, until: float, file: int, event: int) -> None:
        poll = select.poll()
        poll.register(file, event)
        stopped = Stopped(self.pid)
        while (left := until - time.monotonic()) > 0:
            if poll.poll(min(left, _LOOK_SECONDS) * 1000):
                return
            stopped.look()
            if stopped.is_over:
                raise _WasStopped
        raise _TookTooMuch(f"it took longer than {self._limits.seconds:g} seconds")


def _end(process: "subprocess.Popen[bytes]", held: int) -> None:
    process.kill()
    os.close(held)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    process.wait()
