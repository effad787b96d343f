"""Compare the time of an execution of ONNX models with that of onnxruntime.

    python tools/onnx_speed.py resnet50 text.onnx:x=3,48,192 [--batch 1,8] [--seconds 5]

A model is a network of tests/support/onnx_networks.py, with random weights, or a file, with the
shapes of its inputs without the batch where the file leaves them open. The conversion of an import
and onnxruntime run it in turns in this process, on the same random inputs and cores, after their
answers were compared. As in a load, a batch is executed in pieces where those are measured to be
quicker, and the line says of how many rows. Each line has the best time of both, since other work
on the machine makes times longer and never shorter, and their ratio; the last has the geometric
mean of the ratios.
"""

# Much of jax is typed, but not all that is called here.
# mypy: disallow-untyped-calls=False

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, fsum, log
from pathlib import Path
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import jax
import numpy as np
import onnx
import onnxruntime
from support import onnx_networks

from xlaserve.models.onnx import checking, planning, reading, signature
from xlaserve.models.onnx.graph import Graph
from xlaserve.models.optimizing import optimize
from xlaserve.models.packing import KERNEL_ORDER, Packing, Parameter, is_kernel
from xlaserve.models.program_table import Call, Program, Table
from xlaserve.tensors import Tensor

NETWORKS: Mapping[str, Callable[[], onnx.ModelProto]] = MappingProxyType(
    {
        "distilbert": lambda: onnx_networks.distilbert(onnx_networks.DISTILBERT),
        "efficientnet": lambda: onnx_networks.efficientnet(224),
        "mobilenet_v2": onnx_networks.mobilenet_v2,
        "mobilenet_v3": lambda: onnx_networks.efficientnet(224, hard=True),
        "resnet50": onnx_networks.resnet50,
        "yolo": lambda: onnx_networks.yolo(320),
    }
)
LENGTH = 128
"""The size of an open dimension that is called a sequence."""
PIECES = (1, 2, 4)
"""Rows of the pieces that are tried; a load tries all of its batch sizes."""
MEASURED_SECONDS = 0.5
"""For which each size is executed before one is chosen."""
TOLERANCE = 1e-3
"""Most that an answer may be off, in parts of its largest number."""
SMALLEST = 1e-3
"""The largest number of an answer that is all but zero counts as this one."""


@dataclass(frozen=True, slots=True)
class Times:
    """The best times of one model and batch, in seconds."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Return our time in parts of that of onnxruntime."""
        return self.ours / self.theirs


def read(said: str) -> tuple[str, onnx.ModelProto, dict[str, tuple[int, ...]]]:
    """Return the name of a model, the model, and the shapes of its inputs that were given."""
    name, _, shapes = said.partition(":")
    if name in NETWORKS:
        return name, NETWORKS[name](), {}
    given = {}
    for each in filter(None, shapes.split(":")):
        key, _, sizes = each.partition("=")
        given[key] = (-1, *(int(size) for size in sizes.split(",")))
    return Path(name).stem, onnx.load(name), given


def runs(
    made: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], batch: int, threads: int
) -> tuple[Callable[[], Sequence[Any]], Callable[[], Sequence[Any]], int]:
    """Return what executes a model on random inputs: converted here, and in onnxruntime.

    And of how many rows the pieces are in which it is executed here.
    """
    data = made.SerializeToString()
    graph = reading.parse(data).graph
    names = {size for one in made.graph.input for size in _dimensions(one)}
    inputs = signature.resolve(
        graph.inputs,
        shapes=shapes,
        dimensions={"sequence": [LENGTH]} if "sequence" in names else {},
        max_batch_size=None,
    )
    given = checking.random_inputs(graph, inputs.specs, batch)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    table = Table(may_split=True)
    names_of_outputs: Sequence[str] = ()
    for rows in sorted({*(size for size in PIECES if size < batch), batch}):
        call, names_of_outputs = _compiled(graph, given, rows)
        some = [value[:rows] for value in given.values()]
        table = table.with_program(Program(call, rows, (), _quickest(call, some)))
    pieces = table.pieces_for(batch)

    def ours() -> Sequence[Any]:
        found, start = [], 0
        for piece in pieces:
            some: list[Any] = [value[start : start + piece.rows] for value in given.values()]
            found.append([np.asarray(each) for each in piece.call((), some)])
            start += piece.rows
        return (
            found[0]
            if len(found) == 1
            else [np.concatenate(each) for each in zip(*found, strict=True)]
        )

    theirs = partial(session.run, names_of_outputs, dict(given))
    return ours, theirs, pieces[0].rows


def _quickest(call: Call, tensors: list[Tensor]) -> float:
    """Return the seconds of the quickest of some executions."""
    call((), list(tensors))
    return timed(partial(call, (), list(tensors)), lambda: None, MEASURED_SECONDS).ours


def _compiled(graph: Graph, given: Mapping[str, Tensor], rows: int) -> tuple[Call, list[str]]:
    """Return the program of so many rows, which holds its parameters, and its outputs' names."""
    with jax.enable_x64(True):
        arguments = {
            name: jax.ShapeDtypeStruct((rows, *value.shape[1:]), value.dtype)
            for name, value in given.items()
        }
        plan = planning.plan(graph, arguments)
        held = sorted(plan.parameters)
        packing, leaves = _held([np.asarray(plan.parameters[name]) for name in held])

        def model(leaves: Sequence[jax.Array], given: Mapping[str, jax.Array]) -> Any:
            taken = dict(zip(held, packing.unpack(leaves), strict=True))
            return optimize(plan.__call__)(taken, given)

        compiled = jax.jit(model).lower(leaves, arguments).compile()
        parameters = jax.device_put(leaves)

    def call(leaves: Sequence[jax.Array], tensors: Any) -> list[jax.Array]:
        with jax.enable_x64(True):
            named = dict(zip(given, tensors, strict=True))
            found = jax.block_until_ready(compiled(parameters, named))
        return [found[name] for name in plan.outputs]

    return call, list(plan.outputs)


def _held(tensors: Sequence[Tensor]) -> tuple[Packing, list[Tensor]]:
    """Return parameters as a load holds large ones, and how."""
    turned = [n for n, each in enumerate(tensors) if is_kernel(Parameter(each.dtype, each.shape))]
    packing = Packing.of({}, len(tensors), turned)
    return packing, [
        np.ascontiguousarray(each.transpose(KERNEL_ORDER)) if number in turned else each
        for number, each in enumerate(tensors)
    ]


def _dimensions(given: onnx.ValueInfoProto) -> list[str]:
    return [size.dim_param for size in given.type.tensor_type.shape.dim]


def check_alike(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Raise SystemExit where answers differ."""
    for mine, other in zip(ours, theirs, strict=True):
        left, right = (np.asarray(each, np.float64) for each in (mine, other))
        scale = max(float(np.abs(right).max(initial=0.0)), SMALLEST)
        difference = float(np.abs(left - right).max(initial=0.0)) / scale
        if not difference <= TOLERANCE:
            raise SystemExit(f"answers differ by {difference:.2g} of the largest number")


def timed(ours: Callable[[], Any], theirs: Callable[[], Any], seconds: float) -> Times:
    """Execute both in turns for so long, and return the best time of each."""
    best = [float("inf")] * 2
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for place, run in enumerate((ours, theirs)):
            started = time.perf_counter()
            run()
            best[place] = min(best[place], time.perf_counter() - started)
    return Times(*best)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return exp(fsum(map(log, ratios)) / len(ratios))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each model and batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", default=list(NETWORKS))
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of onnxruntime")
    asked = parser.parse_args(arguments)
    print(
        "| model | batch | ms | ms of onnxruntime | ratio | piece |\n|---|---:|---:|---:|---:|---:|"
    )
    ratios: list[float] = []
    for said in asked.models:
        name, made, shapes = read(said)
        for batch in map(int, asked.batch.split(",")):
            ours, theirs, piece = runs(made, shapes, batch, asked.threads)
            check_alike(ours(), theirs())
            found = timed(ours, theirs, asked.seconds)
            ratios.append(found.ratio)
            row = f"{found.ours * 1e3:.2f} | {found.theirs * 1e3:.2f} | {found.ratio:.2f}"
            print(f"| {name} | {batch} | {row} | {piece} |", flush=True)
    print(f"\ngeometric mean {geometric_mean(ratios):.2f}, most {max(ratios):.2f}")


if __name__ == "__main__":
    main()
