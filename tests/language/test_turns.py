"""Fair scheduling of callers on one thread, by the time that each has used."""

import threading

import pytest

from xlaserve.errors.language import TooManyTexts
from xlaserve.language.turns import CallerThread, Charged


def test_who_has_taken_least_is_next() -> None:
    found: Charged[int] = Charged()
    for number in range(4):
        found.add("much", number)
    order = []
    for number in range(4):
        caller, item = found.take()
        order.append(item)
        if number == 0:
            found.add("little", 10)
            found.add("little", 11)
        found.charge(caller, 100 if caller == "much" else 1)

    assert [0, 10, 11, 1] == order
    assert [("much", 2), ("much", 3)] == [found.take(), found.take()]


def test_who_comes_late_goes_before_no_more_than_who_has_taken_as_little() -> None:
    """A caller that has waited long enough is not overtaken by every newcomer."""
    found: Charged[str] = Charged()
    for _ in range(2):
        found.add("a", "a")
        found.add("b", "b")
    for _ in range(2):
        caller, _ = found.take()
        found.charge(caller, 100)
    for number in range(3):
        found.add(f"late {number}", "late")

    assert ["a", "b"] == [found.take()[1] for _ in range(2)]


def test_what_was_taken_is_forgotten_when_nobody_waits() -> None:
    found: Charged[str] = Charged()
    found.add("a", "a")
    found.charge(found.take()[0], 100)
    found.add("a", "first")
    found.add("b", "second")

    assert ["first", "second"] == [found.take()[1] for _ in range(2)]


def test_a_thread_tells_what_became_of_each_call() -> None:
    """Including a call that raises a BaseException, after which the others continue."""

    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic

    thread, may_go_on = CallerThread("test"), threading.Event()
    first = thread.submit("a", lambda: may_go_on.wait(30))
    raised, made = thread.submit("a", panic), thread.submit("b", lambda: 2)
    cancelled = thread.submit("b", lambda: 3)
    assert cancelled.cancel()
    may_go_on.set()

    assert first.result(30)
    assert "Panic: " == str(raised.exception(30))
    assert 2 == made.result(30)
    thread.close()
    with pytest.raises(RuntimeError, match="the thread has ended"):
        thread.submit("a", panic)


def test_the_texts_of_a_caller_that_wait_have_a_limit() -> None:
    """A caller with an empty queue is not refused; an answered text frees a slot."""
    thread, may_go_on, has_begun = (
        CallerThread("test", "m", 3),
        threading.Event(),
        threading.Event(),
    )

    def blocks() -> None:
        has_begun.set()
        may_go_on.wait()

    try:
        thread.submit("much", blocks)
        has_begun.wait()
        waiting = [thread.submit("much", int) for _ in range(3)]
        with pytest.raises(TooManyTexts, match="model 'm': 3 texts of this caller"):
            thread.submit("much", int)
        other = thread.submit("little", lambda: "answered")
        may_go_on.set()
        assert "answered" == other.result()
        assert {0} == {one.result() for one in waiting}
        assert "again" == thread.submit("much", lambda: "again").result()
    finally:
        may_go_on.set()
        thread.close()
