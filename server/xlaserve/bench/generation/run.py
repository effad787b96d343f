"""Runs a token generation benchmark: metadata, a probe request, then the schedule."""

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
"""The input that language models on this server have (docs/generation.md)."""
_PROBE = -1
_MARGIN = 60.0
"""Seconds added to request timeouts, so that they never expire during the measurement."""


@dataclass(frozen=True, slots=True)
class Job:
    """The parameters of a measurement."""

    address: ServerAddress
    model: str
    version: str
    schedule: Schedule
    vocab: int
    """Vocabulary size: prompts consist of random token ids below it."""
    connections: int
    """Number of connections that share the requests."""
    timeout: float
    """Timeout in seconds, for the probe request and for requests in flight at the end."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a measurement."""

    model: str
    schedule: Schedule
    figures: Figures

    def as_json(self, url: str) -> dict[str, Any]:
        """Return the results as a JSON object."""
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
    """Run a measurement; raise XlaserveError if the probe request fails."""
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
            request = _request(job, number, arrival.lengths.prompt, arrival.lengths.answer)
            try:
                async for answer in client.stream(request, schedule.duration + timeout):
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
    """Request one token for the longest prompt, to detect wrong options before measuring."""
    specs = await client.inputs(job.model, job.version)
    if INPUT not in specs:
        got = ", ".join(f"'{spec.name}' {spec}" for spec in specs) or "none"
        raise BenchmarkRefused(
            f"model '{job.model}': --generate expects an input '{INPUT.name}' {INPUT}, got {got}"
        )
    longest = max(arrival.lengths.prompt for arrival in job.schedule.arrivals)
    request = _request(job, _PROBE, longest, 1)
    try:
        tokens = [
            one async for one in client.stream(request, job.timeout) if "token" in one.outputs
        ]
    except CallFailed as error:
        raise BenchmarkRefused(
            f"{error}\nThe longest prompt has {longest} tokens with ids below {job.vocab}: change"
            " this with --lengths or --longest, and --vocab"
        ) from error
    if not tokens:
        raise BenchmarkRefused(f"model '{job.model}': its answer has no output 'token'")


def _request(job: Job, number: int, prompt: int, answer: int) -> InferRequest:
    # Every prompt is different, so that the server's prefix cache cannot help.
    random = np.random.default_rng((job.schedule.seed, number + 1))
    tokens = random.integers(job.vocab, size=prompt).astype(np.int32)
    return InferRequest(
        job.model,
        job.version,
        "",
        (InferInput(INPUT.name, INPUT.datatype, tokens),),
        parameters={"max_tokens": answer, "ignore_eos": True},
    )
