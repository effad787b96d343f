"""Exceptions that do not derive from Exception, such as panics of Rust libraries."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What ends a task of the event loop, a generator or the server, and is passed on there. Whatever
else is raised where somebody waits for an answer becomes that answer, Exception or not."""


class Panicked(Exception):
    """Code in a thread raised what is no Exception, which is its cause."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {text_of(error)}")
        self.__cause__ = error


def answerable(error: BaseException) -> Exception:
    """Return what a call raised in a thread as whoever waits for it is told.

    Nothing there is cancelled, interrupted or ended by what it raises, whatever that is.
    """
    return error if isinstance(error, Exception) else Panicked(error)


def answering(call: Callable[[], T]) -> Callable[[], T]:
    """Return a call that raises Exceptions alone, for a thread of a pool."""

    def run() -> T:
        try:
            return call()
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            raise Panicked(error) from error

    return run


def text_of(error: BaseException) -> str:
    """Return the text of an error, whatever its class makes of that."""
    try:
        return str(error)
    except BaseException:  # code has the last word on its own errors
        return "(its text cannot be made)"
