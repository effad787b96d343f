"""Exceptions that do not derive from Exception, such as panics of Rust libraries."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task, a generator or the server: they are always raised again. Any other
exception becomes the answer of the call that raised it.
"""


class Panicked(Exception):
    """Code in a thread raised a BaseException that is no Exception; it is the cause."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {text_of(error)}")
        self.__cause__ = error


def answerable(error: BaseException) -> Exception:
    """Convert an exception from a thread into the one that its waiters get.

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
    """Return an error's text, even if its `__str__` fails."""
    try:
        return str(error)
    except BaseException:  # code has the last word on its own errors
        return "(its text cannot be shown)"
