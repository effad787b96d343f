"""Chat templates: their permissions and their limits."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.hard_templates import ATTACKS, NESTED

from xlaserve.errors.language import MessagesRefused, TemplateFailed
from xlaserve.language.limited import LimitedProcess, Limits, TookTooMuch
from xlaserve.language.templates import Template

QUICK = Limits(cpu_seconds=0.2, memory_bytes=64 << 20, output_bytes=1 << 20)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def template() -> Iterator[Any]:
    made: list[Template] = []

    def make(source: str, variables: Mapping[str, Any] | None = None) -> Template:
        made.append(Template({"default": source}, variables or {}, "m", QUICK))
        return made[-1]

    yield make
    for one in made:
        one.close()


def process(template: Template) -> "subprocess.Popen[bytes]":
    running = template._process._process
    assert isinstance(running, LimitedProcess)
    return running._process


def test_templates_have_what_those_of_models_use(template: Any) -> None:
    source = """{%- macro quoted(x) -%}"{{ x }}"{%- endmacro -%}
{%- set ns = namespace(n=0) -%}
{%- for m in messages -%}
    {%- if loop.index0 > 1 %}{% break %}{% endif -%}
    {%- set ns.n = ns.n + 1 -%}
    {% generation %}{{ quoted(m.content) }}{% endgeneration %}
{%- endfor -%}
{{ ns.n }}{{ bos_token }}{{ {'a': "<é'>"} | tojson }}{{ strftime_now('%Y') | length }}
{%- if tools is none and documents is none and add_generation_prompt %}!{% endif -%}"""
    found = template(source, {"bos_token": "<s>"}).render(MESSAGES * 3)

    assert '"hi""hi"2<s>{"a": "<é\'>"}4!' == found


def test_a_template_may_refuse_messages(template: Any) -> None:
    with pytest.raises(
        MessagesRefused, match="its chat template rejected the request: no system here"
    ):
        template("{{ raise_exception('no system here') }}").render(MESSAGES)
    with pytest.raises(MessagesRefused, match=r"its chat template rejected the request: no \?"):
        template("{{ raise_exception('no \\ud800') }}").render(MESSAGES)


QUICKLY = ("nested loops", "a long text", "half a pair")
"""Each takes a process; the others are slow together."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICKLY else [pytest.mark.slow]) for n in ATTACKS],
)
def test_a_template_that_takes_too_much_is_ended(template: Any, name: str) -> None:
    source, reason = ATTACKS[name]
    attacking = template(source)

    with pytest.raises(TemplateFailed, match=reason):
        attacking.render(MESSAGES)
    if "process" in reason or "memory" in reason:
        assert attacking._process._process is None


def test_what_a_template_may_not_see_is_not_there(template: Any) -> None:
    source = "{{ ''|attr('__class__') }}{{ '{0.__class__}'.format('') }}{{ lipsum }}"

    assert "" == template(source).render(MESSAGES)


def test_a_template_that_failed_is_rendered_again(template: Any) -> None:
    """Each attempt runs in a fresh process."""
    found = template("{% if messages|length > 1 %}{{ 'a' * 10**10 }}{% endif %}ok")
    with pytest.raises(TemplateFailed):
        found.render(MESSAGES * 2)

    assert "ok" == found.render(MESSAGES)


@pytest.mark.slow
def test_a_process_that_was_killed_is_started_again(template: Any) -> None:
    """The error does not blame the messages."""
    found = template("ok")
    found.render(MESSAGES)
    killed = process(found)
    killed.kill()
    killed.wait()

    assert "ok" == found.render(MESSAGES)
    assert killed.pid != process(found).pid


def test_the_process_can_open_nothing_and_knows_no_environment(template: Any) -> None:
    """Code that escapes the sandbox finds no files, and none of the server's secrets."""
    found = template("ok")
    found.render(MESSAGES)
    pid = process(found).pid
    with open(f"/proc/{pid}/limits", encoding="ascii") as file:  # noqa: PTH123
        limits = {line[:26].strip(): line[26:].split()[:2] for line in file}
    with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
        variables = [entry.partition(b"=")[0] for entry in file.read().split(b"\0") if entry]

    assert ["0", "0"] == limits["Max open files"]
    assert ["0", "0"] == limits["Max processes"]
    assert ["0", "0"] == limits["Max file size"]
    assert "unlimited" not in limits["Max address space"]
    assert [b"PYTHONPATH"] == variables


def test_a_stopped_process_is_not_waited_for_without_end(template: Any) -> None:
    """A wall-clock limit applies: a stopped process uses no CPU time."""
    stopped = template("ok")
    stopped.render(MESSAGES)
    process(stopped).send_signal(signal.SIGSTOP)
    running = stopped._process._process
    assert isinstance(running, LimitedProcess)
    running._limits = Limits(cpu_seconds=1, seconds=0.3)

    with pytest.raises(TookTooMuch, match=r"it took longer than 0\.3 seconds"):
        running.ask(b"{}")


def test_a_stopped_process_is_replaced_by_one_that_answers(template: Any) -> None:
    stopped = template("ok")
    stopped.render(MESSAGES)
    pid = process(stopped).pid
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)

    assert "ok" == stopped.render(MESSAGES)
    assert pid != process(stopped).pid


@pytest.mark.slow
def test_a_process_that_is_busy_is_ended_at_once() -> None:
    """It does not run on until its CPU limit."""
    limits = Limits(cpu_seconds=600, seconds=1)
    template = Template({"default": NESTED}, {}, "m", limits)

    with pytest.raises(TemplateFailed, match="it took longer than 1 seconds"):
        template.render(MESSAGES)
    assert template._process._process is None


def test_no_process_is_left_behind(template: Any) -> None:
    """Neither for closed templates nor for garbage-collected ones."""
    closed, forgotten = template("ok"), Template({"default": "ok"}, {})
    pids = []
    for one in (closed, forgotten):
        one.render(MESSAGES)
        pids.append(process(one).pid)
    closed.close()
    closed.close()
    del one, forgotten

    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_threads_share_a_template(template: Any) -> None:
    found = template("{{ messages[0].content }}")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: found.render([{"content": str(n)}]), range(40)))

    assert [str(n) for n in range(40)] == texts


def test_messages_larger_than_a_pipe_go_through(template: Any) -> None:
    written = "é😀" * 40_000

    assert written == template("{{ messages[0].content }}").render([{"content": written}])
