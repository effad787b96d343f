"""Iterates on the event loop in small steps, so that requests proceed in between."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

AT_A_TIME = 32
"""Default number of items between two yields to the event loop; processing this many rows of a
table takes less than a millisecond."""


async def in_turns(items: Iterable[T], at_a_time: int = AT_A_TIME) -> AsyncIterator[T]:
    """Yield items, and yield to the event loop after every few of them."""
    for number, item in enumerate(items):
        if number % at_a_time == at_a_time - 1:
            await asyncio.sleep(0)
        yield item
