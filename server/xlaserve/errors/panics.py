"""Handles BaseExceptions that are not Exceptions, such as panics in Rust libraries."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a task, a generator or the server; they are always re-raised. Any other
exception becomes the result of the call that raised it."""


class Panicked(Exception):
    """Code on a thread raised a BaseException that is not an Exception; see `__cause__`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {text_of(error)}")
        self.__cause__ = error


def answerable(error: BaseException) -> Exception:
    """Convert an exception from a thread to the Exception that waiting callers get.

    A worker thread's CancelledError or KeyboardInterrupt must not cancel or interrupt its callers.
    """
    return error if isinstance(error, Exception) else Panicked(error)


def answering(call: Callable[[], T]) -> Callable[[], T]:
    """Wrap a call for a pool thread, so that it only raises Exceptions."""

    def run() -> T:
        try:
            return call()
        except BaseException as error:
            if isinstance(error, Exception):
                raise
            raise Panicked(error) from error

    return run


def text_of(error: BaseException) -> str:
    """Return an error's text, even if its `__str__` raises."""
    try:
        return str(error)
    except BaseException:  # models' code can define exceptions with a faulty __str__
        return "(its text cannot be shown)"
