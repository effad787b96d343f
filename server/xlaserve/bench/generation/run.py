"""A measurement of a generator: look it up, try the longest prompt, keep the schedule."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.generation.figures import Figures, figures
from xlaserve.bench.generation.open_loop import observe
from xlaserve.bench.generation.schedule import Arrival, Schedule
from xlaserve.dialing.address import ServerAddress
from xlaserve.dialing.interface import CallFailed
from xlaserve.dialing.over_grpc import Client
from xlaserve.serving.inference import InferInput, InferRequest
from xlaserve.tensors import TensorSpec, datatype_named

INPUT = TensorSpec("tokens", datatype_named("INT32"), (-1,))
"""The input of generators of this server (docs/generation.md)."""
_PROBE = -1
_MARGIN = 60.0
"""Seconds between the end of the measurement and the cancellation of requests."""


@dataclass(frozen=True, slots=True)
class Job:
    """A measurement to be made."""

    address: ServerAddress
    model: str
    version: str
    schedule: Schedule
    vocab: int
    """Token ids of prompts are below it."""
    connections: int
    """Connections that requests are spread over."""
    timeout: float
    """Timeout in seconds: for the very first answer, and for requests in flight at the end."""


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a job."""

    model: str
    schedule: Schedule
    figures: Figures

    def as_json(self, url: str) -> dict[str, Any]:
        """Return it in terms of JSON."""
        schedule = self.schedule
        return {
            "model": self.model,
            "url": url,
            "protocol": "grpc",
            "rate": schedule.rate,
            "seed": schedule.seed,
            "warmup_seconds": schedule.warmup,
            "duration_seconds": schedule.duration,
            **self.figures.as_json(),
        }


async def run(job: Job) -> Report:
    """Return what a job measures; raises XlaserveError where its first request has no answer."""
    schedule = job.schedule
    async with AsyncExitStack() as stack:
        timeout = job.timeout + _MARGIN
        clients = [
            await stack.enter_async_context(Client(job.address, timeout=timeout))
            for _ in range(job.connections)
        ]
        await _probe(job, clients[0])

        async def send(number: int, arrival: Arrival) -> AsyncGenerator[None, None]:
            client = clients[number % len(clients)]
            asked = _request(job, number, arrival.lengths.prompt, arrival.lengths.answer)
            try:
                async for answer in client.stream(asked, schedule.duration + timeout):
                    if "token" in answer.outputs:
                        yield
            except Exception as error:
                failure = client.failure(error)
                if failure is None:
                    raise
                raise failure from error

        observed = await observe(schedule.arrivals, send, wait=job.timeout)
    return Report(job.model, schedule, figures(observed))


async def _probe(job: Job, client: Client) -> None:
    """Ask for a token after the longest prompt, so that a mistake is an error and no figure."""
    specs = await client.inputs(job.model, job.version)
    if INPUT not in specs:
        got = ", ".join(f"'{spec.name}' {spec}" for spec in specs) or "none"
        raise BenchmarkRefused(
            f"model '{job.model}': --generate expects an input '{INPUT.name}' {INPUT}, got {got}"
        )
    longest = max(arrival.lengths.prompt for arrival in job.schedule.arrivals)
    asked = _request(job, _PROBE, longest, 1)
    try:
        tokens = [one async for one in client.stream(asked, job.timeout) if "token" in one.outputs]
    except CallFailed as error:
        raise BenchmarkRefused(
            f"{error}\nThe longest prompt has {longest} tokens with ids below {job.vocab}: change"
            " this with --lengths or --longest, and --vocab"
        ) from error
    if not tokens:
        raise BenchmarkRefused(f"model '{job.model}': its answer has no output 'token'")


def _request(job: Job, number: int, prompt: int, answer: int) -> InferRequest:
    # Prompts differ, so that none is answered from what is kept of another.
    random = np.random.default_rng((job.schedule.seed, number + 1))
    tokens = random.integers(job.vocab, size=prompt).astype(np.int32)
    return InferRequest(
        job.model,
        job.version,
        "",
        (InferInput(INPUT.name, INPUT.datatype, tokens),),
        parameters={"max_tokens": answer, "ignore_eos": True},
    )
