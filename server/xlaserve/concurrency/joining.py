"""Waits for threads to end, with a time limit."""

import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial


def ended(pool: ThreadPoolExecutor, seconds: float | None = None) -> bool:
    """Shut down a pool: cancel queued calls, and wait for running ones.

    Waits at most this many seconds; returns whether all threads have ended.
    """
    ending = threading.Thread(target=partial(pool.shutdown, cancel_futures=True), daemon=True)
    ending.start()
    return joined([ending], seconds)


def joined(threads: Iterable[threading.Thread], seconds: float | None = None) -> bool:
    """Wait for threads to end, within a time limit; tell whether all have ended."""
    until = None if seconds is None else time.monotonic() + seconds
    for thread in threads:
        thread.join(None if until is None else max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
