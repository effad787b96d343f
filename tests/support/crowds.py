"""Runs one client next to another client that sends many slow requests."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from support.conditions import until

T = TypeVar("T")


class Beside(NamedTuple):
    """Result of running a request next to a crowd."""

    good: object
    """Answer to the other client's request."""
    before: int
    """Requests of the crowd that had completed by then."""
    ended: list[str]
    """Outcomes of the crowd's requests, in the order of completion."""


async def beside_a_crowd(
    hostile: Callable[[int], Awaitable[str]], good: Callable[[], Awaitable[T]], count: int
) -> Beside:
    """Send `count` hostile requests, and a good one when the first of those has completed.

    The good request waits only for executions in progress, not for the whole queue: fewer than
    half of the crowd's requests may complete before it.
    """
    ended: list[str] = []

    async def one(number: int) -> None:
        ended.append(await hostile(number))

    tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
    await until(lambda: ended)
    answer = await good()
    before = len(ended)
    await asyncio.gather(*tasks)
    return Beside(answer, before, ended)
