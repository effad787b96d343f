"""Compares a generator's tokens per second with transformers and llama.cpp on the same cores.

    python tools/compare_generation.py [--peer PYTHON] [--rounds 5] [--size 125m]

A Llama with random weights is imported and served. Contenders take turns within each round, so that
other load on the machine affects all of them; the table has medians of rounds, and ratios. `--peer`
is a Python with torch, transformers, xllamacpp (llama.cpp in a wheel), gguf and safetensors;
without it only the server is measured. transformers uses static batches, llama.cpp continuous ones.
All have the same FP32 weights; their greedy tokens are compared first. In `burst` all requests
start together; in `open` they arrive at random, whether or not earlier ones have finished. The last
part sends prompts of 1,000 tokens while other requests run, and measures the time between those
requests' tokens.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median

import aiohttp
import numpy as np

from generation_checkpoint import LENGTH, SIZES, VOCAB, write_checkpoint
from generation_contenders import (
    Contender,
    Request,
    Streaming,
    import_model,
    llama_cpp,
    serving,
    static_batches,
)

BURSTS = (1, 4, 8, 16)
PROMPT, OPEN_REQUESTS = 64, 16
SPREAD = 5
"""Ratio of the longest answer of a round to the shortest; real answers vary in length, too."""
LONG_PROMPT, RUNNING = 1000, 4
MOST_GAP = 4.0
"""Limit on p99 over p50 of the time between tokens while long prompts arrive."""
LEAST_GAIN, SIDE_BY_SIDE = 3.0, 8
"""Minimum ratio of the rate with this many concurrent requests to that of one."""
AGREED, LEAST_AGREED = 32, 8
"""Greedy tokens to compare, and how many must agree: after a near tie they may diverge."""


def requests_of(
    random_: random.Random, count: int, rate: float | None, longest: int
) -> list[Request]:
    """Return requests that start together, or arrive at random at a given rate."""
    due, found = 0.0, []
    for _ in range(count):
        due += 0.0 if rate is None else random_.expovariate(rate)
        counted = random_.randint(-(-longest // SPREAD), longest)
        found.append(Request(due, prompt_of(random_, PROMPT), counted))
    return found


def prompt_of(random_: random.Random, length: int) -> list[int]:
    """Return a prompt of random, non-special tokens."""
    return [random_.randrange(3, VOCAB) for _ in range(length)]


async def agree(contenders: Sequence[Contender]) -> None:
    """Print how many greedy tokens agree; raises SystemExit if the models differ."""
    prompt = prompt_of(random.Random(0), PROMPT)
    first, *others = [await one.tokens(prompt, AGREED) for one in contenders]
    for contender, tokens in zip(contenders[1:], others, strict=True):
        pairs = zip(first, tokens, strict=True)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        print(f"{contender.name}: the first {alike} of {AGREED} greedy tokens are ours")
        if alike < LEAST_AGREED:
            raise SystemExit(f"{contender.name} has another model: {tokens}, ours {first}")


async def compare(
    contenders: Sequence[Contender], rounds: int, rate: float, longest: int
) -> dict[str, float]:
    """Print medians of tokens per second and of latencies; return our rates by case."""
    cases = [(f"burst of {count}", count, None) for count in BURSTS]
    plans: list[tuple[str, int, float | None]] = [
        *cases,
        (f"open, {rate:g}/s", OPEN_REQUESTS, rate),
    ]
    rates: dict[tuple[str, str], list[float]] = {}
    waits: dict[tuple[str, str], list[float]] = {}
    for contender in contenders:  # warm up; the result is discarded
        await contender.run(requests_of(random.Random("warm-up"), SIDE_BY_SIDE, None, SPREAD))
    for number in range(rounds):
        for case, count, arrivals in plans:
            # A new prompt each time: otherwise the server could reuse cached rows.
            requests = requests_of(random.Random(f"{case} {number}"), count, arrivals, longest)
            for contender in contenders:
                found = await contender.run(requests)
                rates.setdefault((case, contender.name), []).append(found.rate)
                waits.setdefault((case, contender.name), []).append(median(found.waits))
    names = [contender.name for contender in contenders]
    print(
        f"\n| requests | {' | '.join(f'{name}, tokens/s' for name in names)} | ratio | waits, s |"
    )
    print("| --- |" + " --- |" * (len(names) + 2))
    for case, _, _ in plans:
        medians = [median(rates[case, name]) for name in names]
        shown = " | ".join(f"{value:.1f}" for value in medians)
        ratios = ", ".join(f"{medians[0] / value:.2f}" for value in medians[1:]) or "-"
        waited = " / ".join(f"{median(waits[case, name]):.2f}" for name in names)
        print(f"| {case} | {shown} | {ratios} | {waited} |")
    return {case: median(rates[case, names[0]]) for case, _, _ in plans}


async def beside_long_prompts(contender: Streaming, long_ones: int) -> float:
    """Print the time between tokens while long prompts arrive; return its p99 over its p50."""
    random_ = random.Random(1)
    answers = list[list[float]]()
    """Arrival times of the tokens of each answer."""
    started = asyncio.Semaphore(0)

    async def run() -> None:
        while True:  # start another answer if one ends before the long prompts do
            answers.append(times := [])
            prompt = prompt_of(random_, PROMPT)
            async for at, _ in contender.events(prompt, LENGTH - PROMPT - 1):
                times.append(at)
                started.release()

    running = [asyncio.ensure_future(run()) for _ in range(RUNNING)]
    for _ in range(8 * RUNNING):  # until all of them are past their prompts
        await started.acquire()
    began = time.perf_counter()
    for _ in range(long_ones):
        await contender.tokens(prompt_of(random_, LONG_PROMPT), 1)
    ended = time.perf_counter()
    for one in running:
        one.cancel()
    await asyncio.wait(running)
    gaps = [
        after - before
        for times in answers
        for before, after in pairwise(times)
        if began <= before and after <= ended
    ]
    middle, high = (float(np.percentile(gaps, at)) * 1e3 for at in (50, 99))
    print(
        f"{contender.name}: between tokens of {RUNNING} requests beside {long_ones} prompts of "
        f"{LONG_PROMPT}, {(ended - began) / long_ones:.2f} s each: p50 {middle:.1f} ms, p99 "
        f"{high:.1f} ms, {high / middle:.2f} of it; {len(gaps)} gaps"
    )
    return high / middle


async def main() -> int:
    """Compare; return 1 if the server misses a target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", type=Path, help="a Python with the packages of the peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second, open loop")
    parser.add_argument("--tokens", type=int, default=80, help="tokens of the longest answers")
    parser.add_argument("--long-prompts", type=int, default=6)
    parser.add_argument("--size", choices=SIZES, default="125m")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        count = write_checkpoint(folder / "llama", asked.size)
        await import_model(folder)
        async with AsyncExitStack() as stack:
            timeout = aiohttp.ClientTimeout(None)
            # llama.cpp closes each connection right after a stream without announcing it: the next
            # request on a kept-alive connection would be lost.
            connector = aiohttp.TCPConnector(force_close=True)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, timeout=timeout)
            )
            async with serving(folder, session) as cold:
                pass
            server = await stack.enter_async_context(serving(folder, session))
            contenders: list[Contender] = [server]
            if asked.peer is not None:
                peer = static_batches(asked.peer, folder)
                contenders.append(await stack.enter_async_context(peer))
                other = llama_cpp(asked.peer, folder, session)
                contenders.append(await stack.enter_async_context(other))
            cores = len(os.sched_getaffinity(0))
            load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
            print(f"\n{count / 1e6:.0f} million parameters, {cores} cores, load before {load}")
            print(
                f"ready after {cold.start_seconds:.1f} s, and after {server.start_seconds:.1f} s "
                "where the programs were compiled before"
            )
            await agree(contenders)
            rates = await compare(contenders, asked.rounds, asked.rate, asked.tokens)
            gain = rates[f"burst of {SIDE_BY_SIDE}"] / rates["burst of 1"]
            print(f"\n{SIDE_BY_SIDE} requests side by side: {gain:.2f} times the rate of one")
            streaming = [one for one in contenders if isinstance(one, Streaming)]
            evenness = [await beside_long_prompts(one, asked.long_prompts) for one in streaming]
            print("load after", ", ".join(f"{one:.1f}" for one in os.getloadavg()))
    print(f"wanted: at least {LEAST_GAIN:g} times, and a p99 of at most {MOST_GAP:g} times the p50")
    return int(gain < LEAST_GAIN or evenness[0] > MOST_GAP)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
