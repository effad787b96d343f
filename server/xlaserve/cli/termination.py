"""Commands that remove unfinished files when a signal ends them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
SIGNALLED = 128
"""Added to the number of the signal that ended a process, this is its exit status in a shell."""


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the process through every `finally` of a block."""
    before = {number: signal.signal(number, _end) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(SIGNALLED + number)
