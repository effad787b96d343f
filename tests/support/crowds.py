"""A caller who asks for much that takes long, and another one beside it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from support.conditions import until

T = TypeVar("T")


class Beside(NamedTuple):
    """What became of both."""

    good: object
    """The answer to the other one."""
    before: int
    """Requests of the crowd that had ended by then."""
    ended: list[str]
    """How those of the crowd ended."""


async def beside_a_crowd(
    hostile: Callable[[int], Awaitable[str]], good: Callable[[], Awaitable[T]], count: int
) -> Beside:
    """Ask so often at once, and once as another caller when the first of those has ended.

    The other one waits for what has begun, and not for all that came before: less than half of the
    crowd has ended before it is answered.
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
