"""Waits for conditions, never for a fixed time."""

import asyncio
from collections.abc import Callable

MOST_SECONDS = 60
_POLL_SECONDS = 0.01


async def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds; raises TimeoutError after a generous limit."""
    async with asyncio.timeout(MOST_SECONDS):
        while not holds():
            await asyncio.sleep(_POLL_SECONDS)
