"""Runs blocking parts of a load that stop once the load is cancelled."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from xlaserve.concurrency.workers import Workers
from xlaserve.errors import LoadCancelled

CheckCancelled: TypeAlias = Callable[[], None]
"""Raises LoadCancelled once the load has been cancelled."""


async def until_given_up(
    workers: Workers, model: str, work: Callable[[CheckCancelled], None]
) -> None:
    """Run part of a load in a thread; `work` is told to stop if the caller is cancelled.

    Raises the exceptions of `work`.
    """
    given_up = threading.Event()

    def check_cancelled() -> None:
        if given_up.is_set():
            raise LoadCancelled(model)

    call = workers.load(partial(work, check_cancelled))
    try:
        await asyncio.wrap_future(call.future)
    finally:
        given_up.set()
