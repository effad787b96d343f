"""Cooperative work on the event loop, in parts between which requests proceed."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

AT_A_TIME = 32
"""Rows of a table processed in less than a millisecond."""


async def in_turns(items: Iterable[T], at_a_time: int = AT_A_TIME) -> AsyncIterator[T]:
    """Yield items, and the event loop every few of them."""
    for number, item in enumerate(items):
        if number % at_a_time == at_a_time - 1:
            await asyncio.sleep(0)
        yield item
