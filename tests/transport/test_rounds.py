import asyncio

from xlaserve.net.rounds import Rounds


async def until(loop_turns: int) -> None:
    for _ in range(loop_turns):
        await asyncio.sleep(0)


async def test_a_round_takes_a_few_in_each_turn_of_the_loop() -> None:
    """Others are served in between: no iteration visits all of ten thousand items."""
    looked: list[int] = []
    ends: list[int] = []
    rounds = Rounds(
        lambda: range(1000),
        looked.append,
        seconds=lambda: 0.001,
        afterwards=lambda: ends.append(len(looked)),
    )
    longest = before = 0

    rounds.begin()
    while not ends:
        await asyncio.sleep(0)
        longest, before = max(longest, len(looked) - before), len(looked)
    rounds.stop()

    assert [1000] == ends
    assert list(range(1000)) == looked
    assert 0 < longest <= 100


async def test_every_round_asks_who_is_there_and_how_long_to_wait() -> None:
    there = {"a"}
    looked: list[str] = []
    waits: list[float] = []

    def seconds() -> float:
        waits.append(0.001)
        return waits[-1]

    rounds = Rounds(lambda: there, looked.append, seconds=seconds)
    rounds.begin()
    while looked.count("a") < 2:
        await asyncio.sleep(0)
    there.add("b")
    there.discard("a")
    looked.clear()
    while "b" not in looked:
        await asyncio.sleep(0)
    rounds.stop()

    assert {"a"} >= set(looked) - {"b"}
    assert len(waits) > 2


async def test_nothing_is_looked_at_behind_the_end() -> None:
    """Not even the rest of a round that has begun."""
    looked: list[int] = []
    rounds = Rounds(lambda: range(1000), looked.append, seconds=lambda: 0.0)
    assert not rounds.has_begun

    rounds.begin()
    assert rounds.has_begun
    while not looked:
        await asyncio.sleep(0)
    rounds.stop()
    count = len(looked)
    await until(50)

    assert count == len(looked) < 1000
    assert not rounds.has_begun
