"""A benchmark: look the model up, try the request once, then measure step by step."""

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
    """A benchmark to be run."""

    model: str
    target: Target
    steps: Sequence[Step]
    timing: Timing
    shapes: Mapping[str, Shape]
    """Shapes of inputs by name, where given."""
    batch: int
    """The size of a first dimension that is open."""


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a job."""

    model: str
    protocol: str
    inputs: Mapping[str, str]
    """Datatype and shape by name, as they were sent."""
    timing: Timing
    results: Sequence[Result]

    def as_json(self, url: str) -> dict[str, Any]:
        """Return it in terms of JSON."""
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
    """Measure all steps; `on_step` is called before each with its number and how many there are.

    Raises XlaserveError where the server, the model or the request is not what it should be.
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
