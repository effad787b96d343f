"""Compare the execution time of ONNX models with that of onnxruntime.

    python tools/onnx_speed.py [--write]
    python tools/onnx_speed.py resnet50 text.onnx:x=3,48,192 [--batch 1,8] [--seconds 5]

A model is one of tools/onnx_speed_models.py, or a file, with the shapes of its inputs without the
batch if the file leaves them open. The converted model and onnxruntime are executed alternately in
this process, on the same random inputs and all cores, after a comparison of their answers. JAX and
the allocator are configured as in the server. As in a load, a batch is split into pieces if that
was measured to be faster, and the output shows their number of rows. Each line has the medians and
their ratio; the last has the geometric mean of the ratios, and the worst. The whole run takes at
most --minutes, shared between the rows; --write puts the table into
docs/measurements/performance.md.
"""

# jax is only partly typed.
# mypy: disallow-untyped-calls=False

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import jax
import jax.export
import numpy as np
import onnxruntime

import onnx_speed_models
import onnx_speed_page
from onnx_speed_models import Model
from onnx_speed_page import Row
from xlaserve.authoring.cpu.optimizing import optimize
from xlaserve.importers.onnx import checking, planning, reading, signature
from xlaserve.importers.onnx.graph import Graph
from xlaserve.process import allocator
from xlaserve.runtime.devices import jax_runtime
from xlaserve.runtime.devices.packing import KERNEL_ORDER, Packing, Parameter, is_kernel
from xlaserve.runtime.programs.program_table import Call, Program, Table
from xlaserve.tensors import Tensor

PAGE = Path(__file__).resolve().parent.parent / "docs" / "measurements" / "performance.md"
LENGTH = 128
"""The size of dynamic dimensions that denote a sequence length."""
PIECES = (1, 2, 4)
"""Numbers of rows to try for pieces; a load tries all of its batch sizes."""
PIECE_SECONDS = 0.2
"""How long each size is executed before one is chosen."""
PIECE_RUNS = 3
"""Minimum number of executions of each size."""
BLOCK_SECONDS = 0.05
"""Duration of one contender's block. Its first execution does not count: the other's threads may
still spin, and its weights fill the caches.
"""
LEAST_SECONDS = 0.5
"""Minimum duration of a row once the time budget is used up."""
LEAST_ROUNDS = 3
TOLERANCE = 1e-3
"""Maximum error of an answer, relative to its largest value."""
SMALLEST = 1e-2
"""Lower bound for the value that TOLERANCE is relative to, for answers close to zero."""

Execute = Callable[[], Sequence[Any]]


class Engines:
    """One model in both engines: converted, with a program per size, and in onnxruntime."""

    def __init__(self, model: Model, rows: Sequence[int], threads: int) -> None:
        made = model.make()
        data = made.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            data, options, providers=["CPUExecutionProvider"]
        )
        graph = reading.parse(data).graph
        names = {size.dim_param for one in made.graph.input for size in _dimensions(one)}
        del made, data
        inputs = signature.resolve(
            graph.inputs,
            shapes=model.shapes,
            dimensions={
                **({"sequence": [LENGTH]} if "sequence" in names else {}),
                **{name: [size] for name, size in model.dimensions.items()},
            },
            max_batch_size=None,
        )
        self._given = checking.random_inputs(graph, inputs.specs, max(rows))
        for name, below in model.below.items():
            self._given[name] = self._given[name] % below
        sizes = sorted({*rows, *(size for size in PIECES if size < max(rows))})
        plan, leaves, unpack = _planned(graph, self._given)
        compile_one = partial(_compiled, plan, leaves, unpack, self._given)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            calls = dict(zip(sizes, pool.map(compile_one, sizes), strict=True))
        table = Table(may_split=True)
        for size, call in calls.items():
            some: list[Any] = [value[:size] for value in self._given.values()]
            table = table.with_program(Program(call, size, (), _quickest(call, some)))
        self._table = table
        self._outputs = list(plan.outputs)

    def pieces(self, batch: int) -> int:
        """Return the number of rows in the pieces that a batch is split into."""
        return self._table.pieces_for(batch)[0].rows

    def ours(self, batch: int) -> Execute:
        """Return a function that executes a batch with the converted model."""
        pieces = self._table.pieces_for(batch)
        given = [value[:batch] for value in self._given.values()]

        def execute() -> Sequence[Any]:
            found, start = [], 0
            for piece in pieces:
                some: list[Any] = [value[start : start + piece.rows] for value in given]
                found.append([np.asarray(each) for each in piece.call((), some)])
                start += piece.rows
            return (
                found[0]
                if len(found) == 1
                else [np.concatenate(each) for each in zip(*found, strict=True)]
            )

        return execute

    def theirs(self, batch: int) -> Execute:
        """Return a function that executes a batch in onnxruntime."""
        given = {name: value[:batch] for name, value in self._given.items()}
        return partial(self._session.run, self._outputs, given)


def _dimensions(given: Any) -> Any:
    return given.type.tensor_type.shape.dim


def _quickest(call: Call, tensors: list[Any]) -> float:
    """Return the seconds of the fastest of several executions."""
    runs: list[float] = []
    end = time.monotonic() + PIECE_SECONDS
    while len(runs) < PIECE_RUNS or time.monotonic() < end:
        runs.append(_seconds(partial(call, (), list(tensors))))
    return min(runs)


def _seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _planned(graph: Graph, given: Mapping[str, Tensor]) -> tuple[Any, Any, Any]:
    """Return the plan of a graph, its packed parameters, and the function to unpack them."""
    [rows] = jax.export.symbolic_shape("rows")
    plan = planning.plan(graph, _arguments(given, rows))
    held = sorted(plan.parameters)
    packing, leaves = _held([np.asarray(plan.parameters[name]) for name in held])
    plan.parameters.clear()
    parameters = jax.device_put(leaves)

    def unpack(leaves: Sequence[jax.Array]) -> dict[str, jax.Array]:
        return dict(zip(held, packing.unpack(leaves), strict=True))

    return plan, parameters, unpack


def _arguments(given: Mapping[str, Tensor], rows: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct((rows, *value.shape[1:]), value.dtype)
        for name, value in given.items()
    }


def _compiled(plan: Any, leaves: Any, unpack: Any, given: Mapping[str, Tensor], rows: int) -> Call:
    """Return the compiled program for a number of rows, with its parameters bound."""

    def model(leaves: Sequence[jax.Array], tensors: Sequence[jax.Array]) -> list[jax.Array]:
        found = optimize(plan.__call__)(unpack(leaves), dict(zip(given, tensors, strict=True)))
        return [found[name] for name in plan.outputs]

    arguments = list(_arguments(given, rows).values())
    compiled = jax.jit(model).lower(leaves, arguments).compile()

    def call(_: Sequence[jax.Array], tensors: Any) -> list[jax.Array]:
        outputs: list[jax.Array] = jax.block_until_ready(compiled(leaves, tensors))
        return outputs

    return call


def _held(tensors: Sequence[Tensor]) -> tuple[Packing, list[Tensor]]:
    """Pack large parameters as a load does; return the packing and the packed parameters."""
    turned = [n for n, each in enumerate(tensors) if is_kernel(Parameter(each.dtype, each.shape))]
    packing = Packing.of({}, len(tensors), turned)
    return packing, [
        np.ascontiguousarray(each.transpose(KERNEL_ORDER)) if number in turned else each
        for number, each in enumerate(tensors)
    ]


def check_alike(ours: Sequence[Any], theirs: Sequence[Any], tolerance: float = TOLERANCE) -> None:
    """Raise SystemExit if the answers differ."""
    for mine, other in zip(ours, theirs, strict=True):
        left, right = (np.asarray(each, np.float64) for each in (mine, other))
        scale = max(float(np.abs(right).max(initial=0.0)), SMALLEST)
        difference = float(np.abs(left - right).max(initial=0.0)) / scale
        if not difference <= tolerance:
            raise SystemExit(f"answers differ by {difference:.2g} of the largest number")


def medians(
    ours: Execute,
    theirs: Execute,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Execute both alternately for some seconds, and return the median time of each.

    The one that goes first changes from round to round.
    """
    times: tuple[list[float], list[float]] = ([], [])
    end, rounds = clock() + seconds, 0
    while rounds < LEAST_ROUNDS or clock() < end:
        for place in (0, 1) if rounds % 2 else (1, 0):
            run = (ours, theirs)[place]
            run()
            until = clock() + BLOCK_SECONDS
            while True:
                started = clock()
                run()
                ended = clock()
                times[place].append(ended - started)
                if ended >= until:
                    break
        rounds += 1
    return median(times[0]), median(times[1])


def _told(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Budget:
    """The remaining seconds, shared by the rows still to be measured."""

    def __init__(
        self, seconds: float, models: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._end, self._models = clock, clock() + seconds, models
        self._prepared: list[float] = []

    @property
    def left(self) -> float:
        """Return the seconds until the end, or 0 after it."""
        return max(0.0, self._end - self._clock())

    def prepared(self, seconds: float) -> None:
        """Record how long the preparation of one model took."""
        self._prepared.append(seconds)

    def for_row(self, rows_left: int, most: float) -> float:
        """Return the seconds available for measuring the next row."""
        to_come = self._models - len(self._prepared)
        preparing = max(self._prepared, default=0.0) * to_come
        return min(most, max(LEAST_SECONDS, (self.left - preparing) / max(rows_left, 1)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a row for each model and batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(onnx_speed_models.DEFAULT))
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a row at most")
    parser.add_argument("--minutes", type=float, default=5.0, help="of all rows")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of onnxruntime")
    parser.add_argument(
        "--kept-bytes", type=int, default=256 << 20, help="allocator_kept_bytes of the server"
    )
    parser.add_argument("--write", action="store_true", help="write the page of performance")
    asked = parser.parse_args(arguments)
    batches = [int(size) for size in asked.batch.split(",")]
    jax_runtime.start("cpu")
    allocator.give_back_large_blocks(kept_bytes=asked.kept_bytes)
    budget = Budget(60 * asked.minutes, len(asked.models))
    print(onnx_speed_page.HEAD)
    rows: list[Row] = []
    for number, said in enumerate(asked.models):
        started = time.monotonic()
        if rows and not budget.left:
            _told(f"time is over: {', '.join(asked.models[number:])} left out")
            break
        model = onnx_speed_models.model_of(said)
        _told(f"{number + 1} of {len(asked.models)}: {model.name}, {budget.left:.0f} s left")
        engines = Engines(model, batches, asked.threads)
        budget.prepared(time.monotonic() - started)
        for place, batch in enumerate(batches):
            ours, theirs = engines.ours(batch), engines.theirs(batch)
            check_alike(ours(), theirs(), model.tolerance)
            left = (len(asked.models) - number) * len(batches) - place
            found = medians(ours, theirs, budget.for_row(left, asked.seconds))
            rows.append(Row(model.title, batch, *found, engines.pieces(batch)))
            print(onnx_speed_page.line(rows[-1]), flush=True)
        del engines
    print(f"\n{onnx_speed_page.summary(rows)}")
    if asked.write:
        onnx_speed_page.write(rows, PAGE)


if __name__ == "__main__":
    main()
