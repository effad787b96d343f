"""Waits for what becomes true, and never for a time."""

import asyncio
from collections.abc import Callable

MOST_SECONDS = 60
_LOOK_SECONDS = 0.01


async def until(holds: Callable[[], object]) -> None:
    """Return once a condition holds; raises TimeoutError long after it should have."""
    async with asyncio.timeout(MOST_SECONDS):
        while not holds():
            await asyncio.sleep(_LOOK_SECONDS)
