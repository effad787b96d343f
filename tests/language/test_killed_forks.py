"""The death of a fork by an outside signal says nothing about the text it was given."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from xlaserve.errors import InvalidParameter
from xlaserve.errors.language import TextProcessLost
from xlaserve.language.grammars import Trial
from xlaserve.language.limited import Limited, Limits

CODE = """
import os, sys
sys.path.append({beside!r})
import confining

def begin(first):
    def answer(asked):
        if asked["signal"]:
            os.kill(os.getpid(), asked["signal"])
        return {{"text": ""}}
    return answer

confining.serve(begin)
"""
BY_ITSELF = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals that a text can cause: a CPU limit, or a failed allocation."""
FROM_OUTSIDE = (signal.SIGKILL,)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from xlaserve.language import confining

    path = tmp_path_factory.mktemp("script") / "ends.py"
    path.write_text(CODE.format(beside=str(Path(confining.__file__).parent)))
    return path


def test_only_the_ends_of_its_own_are_too_much(script: Path) -> None:
    limited = Limited((str(script),), Limits(), {}, called="grammar", model="m")
    try:
        over = [limited.ask({"signal": one}) for one in BY_ITSELF]
        for one in FROM_OUTSIDE:
            with pytest.raises(OSError, match=f"was killed .signal {one:d}."):
                limited.ask({"signal": one})
        good = limited.ask({"signal": 0})
    finally:
        limited.close()

    assert [{"over": "it exceeds its limits"}] * len(BY_ITSELF) == over
    assert {"text": ""} == good


SELF_ENDED = """
import os, signal, sys
sys.path.append({beside!r})
import confining

pipes, pipe, leave = [], os.pipe, os._exit

def known_pipe():
    pipes.extend(made := pipe())
    return made

def late_exit(status):
    # Whoever closed the answers before it exits is still there when the end of them is seen.
    try:
        os.fstat(pipes[-1])
    except OSError:
        signal.pause()
    leave(status)

os.pipe, os._exit = known_pipe, late_exit

def begin(first):
    def answer(asked):
        if asked["memory"]:
            raise MemoryError
        return {{"text": "a" * 100}}
    return answer

confining.serve(begin)
"""


@pytest.mark.parametrize("memory", [True, False])
def test_a_fork_that_gives_up_is_not_taken_for_a_killed_one(tmp_path: Path, memory: bool) -> None:
    from xlaserve.language import confining

    path = tmp_path / "gives_up.py"
    path.write_text(SELF_ENDED.format(beside=str(Path(confining.__file__).parent)))
    limited = Limited((str(path),), Limits(output_bytes=50), {}, called="grammar", model="m")
    try:
        answer = limited.ask({"memory": memory})
    finally:
        limited.close()

    assert {"over": "it exceeds its limits"} == answer


class Slow:
    """A fork whose exit is noticed only after several checks."""

    def __init__(self, polls: int, status: int) -> None:
        self.polls, self.status = polls, status
        self.killed: list[int] = []

    def waitpid(self, process: int, options: int) -> tuple[int, int]:
        self.polls -= 1
        ended = self.polls < 0 or not options
        return (process, self.status) if ended else (0, 0)

    def kill(self, process: int, number: int) -> None:
        self.killed.append(number)
        self.status = number


@pytest.mark.parametrize(("status", "signal_number"), [(0, 0), (signal.SIGKILL, signal.SIGKILL)])
def test_a_fork_that_is_still_ending_is_not_killed(
    monkeypatch: pytest.MonkeyPatch, status: int, signal_number: int
) -> None:
    from xlaserve.language import confining

    slow = Slow(3, status)
    monkeypatch.setattr(os, "fork", lambda: 1 << 30)
    fork = confining._Fork(lambda asked: {}, {})
    monkeypatch.setattr(os, "waitpid", slow.waitpid)
    monkeypatch.setattr(os, "kill", slow.kill)

    assert signal_number == fork.end()
    assert [] == slow.killed


class Forks:
    """A process whose forks are killed a given number of times."""

    limits = Limits()

    def __init__(self, kills: int, then: Mapping[str, Any]) -> None:
        self.kills, self.then = kills, then
        self.asked = 0

    def ask(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked += 1
        if self.asked <= self.kills:
            raise OSError("its process was killed (signal 9)")
        return self.then


def test_a_grammar_whose_fork_was_killed_is_tried_again() -> None:
    forks = Forks(2, {"bytes": 5})
    trial = Trial("m", cast(Limited, forks))
    with pytest.raises(TextProcessLost):
        trial.check("regex", "a+")
    assert [5, 5] == [trial.check("regex", "a+") for _ in range(2)]

    assert 3 == forks.asked


def test_one_that_takes_too_much_is_remembered() -> None:
    forks = Forks(1, {"over": ""})
    trial = Trial("m", cast(Limited, forks))
    for _ in range(2):
        with pytest.raises(InvalidParameter):
            trial.check("regex", "a+")

    assert 2 == forks.asked
