"""Runs a benchmark: metadata, a probe request, then the steps of load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlaserve.bench.errors import BenchmarkRefused
from xlaserve.bench.inputs import make_inputs
from xlaserve.bench.load import Step, Timing, run_step
from xlaserve.bench.results import Result, result
from xlaserve.bench.target import Target
from xlaserve.tensors import Shape, describe


@dataclass(frozen=True, slots=True)
class Job:
    """The parameters of a benchmark."""

    model: str
    target: Target
    steps: Sequence[Step]
    timing: Timing
    shapes: Mapping[str, Shape]
    """Input name -> shape, for shapes given on the command line."""
    batch: int
    """The size to use for a dynamic first dimension."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a benchmark."""

    model: str
    protocol: str
    inputs: Mapping[str, str]
    """Input name -> datatype and shape that were sent."""
    timing: Timing
    results: Sequence[Result]

    def as_json(self, url: str) -> dict[str, Any]:
        """Return the results as a JSON object."""
        return {
            "model": self.model,
            "url": url,
            "protocol": self.protocol,
            "inputs": dict(self.inputs),
            "warmup_seconds": self.timing.warmup,
            "duration_seconds": self.timing.duration,
            "steps": [one.as_json() for one in self.results],
        }


async def run(job: Job, on_step: Callable[[Step, int, int], None]) -> Report:
    """Measure all steps; `on_step` is called before each, with its index and their number.

    Raises XlaserveError if the server cannot be reached, the given shapes do not match the model's
    inputs, or the probe request fails.
    """
    specs = await job.target.specs()
    if not specs:
        raise BenchmarkRefused(f"model '{job.model}': its metadata lists no inputs")
    inputs = make_inputs(job.model, specs, job.shapes, job.batch)
    await job.target.probe(inputs)
    connect = job.target.connector(inputs)
    results = []
    for index, step in enumerate(job.steps):
        on_step(step, index, len(job.steps))
        results.append(result(await run_step(step, job.timing, connect)))
    shown = {spec.name: describe(spec.datatype, array.shape) for spec, array in inputs}
    return Report(job.model, job.target.protocol, shown, job.timing, results)
