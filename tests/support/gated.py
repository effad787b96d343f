"""Models of every kind of station whose executions a test lets begin, one after the other.

Each execution connects to a socket of the test, says which requests it is for, and waits for a
byte: so do threads of the server, and processes that it started.
"""

import asyncio
import itertools
import json
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import tritonclient.grpc.aio as triton

import xlaserve
from support.server import RunningServer
from xlaserve.python_models.loading import CONCURRENCY
from xlaserve.runtime.wrappers.ragged import Parts
from xlaserve.serving.stations.table import KINDS, Candidate

BAD = -1.0
"""The value of a request that fails, and every execution that it is in."""

PANIC = -3.0
"""The value of a request that raises what is no Exception, in every execution that it is in."""

DEATH = -2.0
"""The value of a request whose process ends as it executes it."""


def pass_gate(path: str, values: Any) -> None:
    """Wait until an execution for these values may go on. Blocks."""
    numbers = [float(value) for value in np.ravel(values)]
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        end.sendall(struct.pack(f"<i{len(numbers)}d", len(numbers), *numbers))
        end.recv(1)


class Gate:
    """The test's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.executed: list[list[float]] = []
        """The values of each execution, in the order in which they began."""
        self._waiting: deque[tuple[list[float], asyncio.StreamWriter]] = deque()
        self._free = 0

    @property
    def values(self) -> list[float]:
        """Return the values of all executions, in order."""
        return [value for one in self.executed for value in one]

    @property
    def held(self) -> int:
        """Return how many executions wait."""
        return len(self._waiting)

    def free(self, count: int = 1) -> None:
        """Let so many executions go on, those that wait and those that come."""
        self._free += count
        self._let()

    def let(self, value: float) -> None:
        """Let the execution for one value go on that waits."""
        at = next(n for n, (values, _) in enumerate(self._waiting) if values == [value])
        self._waiting[at][1].close()
        del self._waiting[at]

    def close(self) -> None:
        """Hold whatever comes from now on."""
        self._free = 0
        self.executed.clear()

    def _let(self) -> None:
        while self._free and self._waiting:
            self._free -= 1
            self._waiting.popleft()[1].close()

    async def heard(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one execution."""
        (count,) = struct.unpack("<i", await reader.readexactly(4))
        self.executed.append(list(struct.unpack(f"<{count}d", await reader.readexactly(8 * count))))
        self._waiting.append((self.executed[-1], writer))
        self._let()


@asynccontextmanager
async def gate(path: Path) -> AsyncIterator[Gate]:
    """Have a gate for the length of a block; it is open at its end."""
    made = Gate(path)
    async with await asyncio.start_unix_server(made.heard, made.path):
        try:
            yield made
        finally:
            made.free(1 << 30)


# --- what is made of JAX -----------------------------------------------------------------------


def doubled(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    return {"y": x * 2}


def _export(path: Path, row: "Row") -> None:
    shape = [-1, 1] if row.on_demand is False else [-1, "s"]
    more: dict[str, Any] = {}
    if row.on_demand:
        more = {"compiled_shapes": {"s": [1]}, "max_on_demand_shapes": 2}
    inputs: dict[str, Any] = {"x": ("FP32", shape)}
    xlaserve.export_model(doubled, None, inputs, path, max_batch_size=4, **more)


def _export_stream(path: Path, row: "Row") -> None:
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        return {"n": state["n"] + 1}, {"y": x * 2}, state["n"] >= 0

    def begin(params: Any, x: jax.Array) -> Any:
        return {"n": jax.numpy.zeros((), jax.numpy.int32)}

    inputs: dict[str, Any] = {"x": ("FP32", [1])}
    xlaserve.export_stream(step, params=None, inputs=inputs, begin=begin, path=path, max_steps=4)


def _export_ragged(path: Path, row: "Row") -> None:
    def model(params: Any, x: Any, count: Any) -> Any:
        return {"y": x * 2 + 0 * count.sum()}

    inputs: dict[str, Any] = {"x": ("FP32", [16]), "count": ("FP32", [5])}
    xlaserve.export_model(model, None, inputs, path, max_batch_size=0)


_RAGGED = {
    "max_batch_size": 4,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
    "batch_input": [
        {
            "kind": "BATCH_ELEMENT_COUNT",
            "target_name": ["count"],
            "data_type": "TYPE_FP32",
            "source_input": ["x"],
        }
    ],
    "batch_output": [{"target_name": ["y"], "source_input": ["x"]}],
    "parameters": {"batch_independent": {"string_value": "true"}},
}


class Panic(BaseException):
    """As a library in Rust raises one."""


def _check(values: Any) -> None:
    if BAD in np.ravel(values):
        raise ValueError("one of these is bad")
    if PANIC in np.ravel(values):
        raise Panic("one of these is bad")


def _hold_execute(runner: Any, path: str) -> None:
    inner = runner.execute

    def execute(inputs: Mapping[str, Any], **how: Any) -> Any:
        pass_gate(path, inputs["x"])
        _check(inputs["x"])
        return inner(inputs, **how)

    runner.execute = execute
    runner.expected_seconds = lambda rows: 1.0  # nothing of it on the event loop
    runner.batch_limit = 4


def _hold_generate(runner: Any, path: str) -> None:
    inner = runner.generate

    def generate(inputs: Mapping[str, Any], *how: Any, **more: Any) -> Any:
        pass_gate(path, inputs["x"])
        _check(inputs["x"])
        return inner(inputs, *how, **more)

    runner.generate = generate


def _hold_together(runner: Any, path: str) -> None:
    def together(requests: Any, *, replica: int = 0) -> Any:
        values = [one["x"] for one in requests]
        pass_gate(path, values)
        _check(values)
        return {"y": Parts([value * 2 for value in values])}

    runner.together = together


class _Busy:
    """The other workers, none of which is idle (Helpers)."""

    least_seconds = 0.0
    most_bytes = 1 << 20
    are_idle = False

    def serve(self, instance: Any, model: Any, work: Any) -> None:
        """Execute nothing of theirs."""


class _Device:
    """Computes in the thread that fetches (a Dispatching)."""

    def __init__(self, path: str) -> None:
        self.queues = ("cuda:0",)
        self._path = path

    def dispatch(self, inputs: Mapping[str, Any], **how: Any) -> "_Computation":
        return _Computation(self._path, inputs["x"])


class _Computation:
    def __init__(self, path: str, x: Any) -> None:
        self._path, self._x = path, x

    def fetch(self) -> Mapping[str, Any]:
        pass_gate(self._path, self._x)
        _check(self._x)
        return {"y": self._x * 2}


class _OnDevice:
    """A model that was loaded on the host, as if it had been on a device."""

    def __init__(self, inner: Any, device: _Device) -> None:
        self._inner = inner
        self.dispatching = device
        self.batch_limit = 4

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# --- what is code ------------------------------------------------------------------------------

_BEGIN = """
import asyncio, os, socket, struct
import numpy as np
from xlaserve import PythonModel, InferenceError

def begin(end, values):
    numbers = [float(value) for value in np.ravel(values)]
    end.connect({path!r})
    end.sendall(struct.pack("<i%dd" % len(numbers), len(numbers), *numbers))
    return numbers

def go_on(numbers):
    if -2.0 in numbers:
        os._exit(3)
    if -1.0 in numbers:
        raise ValueError("one of these is bad")
    if -3.0 in numbers:
        raise Panic("one of these is bad")

class Panic(BaseException):
    pass

def pass_gate(values):
    with socket.socket(socket.AF_UNIX) as end:
        numbers = begin(end, values)
        end.recv(1)
    go_on(numbers)

async def wait_at_gate(values):
    with socket.socket(socket.AF_UNIX) as end:
        numbers = begin(end, values)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_recv(end, 1)
    go_on(numbers)
"""

OWN = """
class Model(PythonModel):
    batched = {batched}
    def infer(self, inputs):
        pass_gate(inputs["x"])
        return {{"y": inputs["x"] * 2}}
"""

OWN_ASYNC = """
class Model(PythonModel):
    async def infer(self, inputs):
        await wait_at_gate(inputs["x"])
        return {{"y": inputs["x"] * 2}}
"""

OWN_MANY = """
class Model(PythonModel):
    def infer(self, inputs):
        pass_gate(inputs["x"])
        yield {{"y": inputs["x"] * 2}}
"""

TRITON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        pass_gate(np.concatenate([np.ravel(one) for one in found]))
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", one * 2)]) for one in found
        ]
"""

TRITON_MANY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        found = [pb_utils.get_input_tensor_by_name(one, "x").as_numpy() for one in requests]
        pass_gate(np.concatenate([np.ravel(one) for one in found]))
        for request, one in zip(requests, found):
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", one * 2)])
            sender = request.get_response_sender()
            sender.send(answer, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def _tensors(row: "Row") -> dict[str, Any]:
    return {
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}],
    }


def _nothing(runner: Any, path: str) -> None:
    """Leave code as it is: it goes through the gate by itself."""


# --- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One way in which a model may be executed."""

    name: str
    kind: str
    """The name of its row in the table of stations."""
    export: Callable[[Path, "Row"], None] | None = None
    hold: Callable[[Any, str], None] = _nothing
    """Has the executions of what was loaded go through the gate."""
    code: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    on_demand: bool = False
    device: bool = False
    many: bool = False
    """Whether it is asked over a stream."""
    unbatched: bool = False
    """Whether its tensors have no batch dimension."""
    factor: float = 2
    """What it multiplies by."""
    gathers: bool = False
    """Whether several requests may be in one execution."""
    in_progress: int = 1
    """Executions that have begun when the next request waits."""
    is_slow: bool = False
    """Whether it takes seconds, and another one is like it."""
    may_be_two: bool = False
    """Whether its configuration may ask for two copies on the host."""
    step_of: str = ""
    """The row that is the step of this ensemble."""
    around: str = ""
    """The name of what is around its station, in the table of wrappings."""
    batching: Mapping[str, Any] = field(default_factory=dict)
    """What its dynamic_batching says in any case."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its server."""
    is_helped: bool = False
    """Whether another worker would execute its batches, if that were idle."""


def _python(name: str, code: str, *, process: bool = False, **more: Any) -> Row:
    parameters = {"execution": {"string_value": "process" if process else "threads"}}
    config: dict[str, Any] = {"backend": "python", "parameters": parameters}
    if more.pop("decoupled", False):
        config["model_transaction_policy"] = {"decoupled": True}
        more["many"] = more["unbatched"] = True
    where = " in a process" if process else ""
    more.setdefault("may_be_two", not more.get("many"))
    return Row(f"{name}{where}", "handed over", code=code, config=config, **more)


ROWS = (
    Row("jax", "batched on the host", _export, _hold_execute, gathers=True, may_be_two=True),
    Row("jax on demand", "in threads", _export, _hold_execute, on_demand=True),
    Row("device", "batched on a device", _export, device=True, gathers=True, in_progress=2),
    Row(
        name="device on demand",
        kind="alone on a device",
        export=_export,
        device=True,
        on_demand=True,
        in_progress=2,
    ),
    Row("ragged", "ragged", _export_ragged, _hold_together, config=_RAGGED, gathers=True),
    Row("stepped", "generator", _export_stream, _hold_generate, many=True, unbatched=True),
    Row(
        name="identity",
        kind="batched on the host",
        hold=_hold_execute,
        config={"backend": "identity"},
        factor=1,
        may_be_two=True,
    ),
    _python("own", OWN.format(batched=False)),
    _python("own, batched", OWN.format(batched=True), gathers=True),
    _python("own, async", OWN_ASYNC.format(), unbatched=True, in_progress=CONCURRENCY),
    _python("own, many answers", OWN_MANY.format(), many=True, unbatched=True),
    _python("triton", TRITON, gathers=True),
    _python("triton, decoupled", TRITON_MANY, decoupled=True),
    _python("own, batched", OWN.format(batched=True), process=True, gathers=True),
    _python("triton", TRITON, process=True, gathers=True, is_slow=True),
)

SEQUENCES = (
    Row(
        "sequences of triton",
        "sequences",
        code=TRITON,
        config={
            "backend": "python",
            "sequence_batching": {
                "oldest": {"max_candidate_sequences": 8},
                "control_input": [
                    {
                        "name": "START",
                        "control": [{"kind": "CONTROL_SEQUENCE_START", "fp32_false_true": [0, 1]}],
                    }
                ],
            },
        },
    ),
)
"""Those whose requests are asked with the number of a sequence."""

_JAX, _CODE = (next(one for one in ROWS if one.name == name) for name in ("jax", "own"))
_IN_ORDER: dict[str, Any] = {
    "around": "preserve_ordering",
    "batching": {"preserve_ordering": True},
}

SHORT_CUTS = (
    replace(_JAX, name="jax over a stream", many=True),
    replace(_JAX, name="jax by itself", settings={"dynamic_batching": False}),
    replace(_JAX, name="jax with a helper", is_helped=True),
    replace(_JAX, name="jax in order", **_IN_ORDER),
    replace(_CODE, name="own in order", **_IN_ORDER),
    replace(
        _JAX,
        name="jax with kept answers",
        around="response cache",
        config={"response_cache": {"enable": True}},
    ),
)
"""Ways around a station, or into its queue, on which its policies hold too."""

ENSEMBLES = (
    Row("ensemble of jax", "ensemble", step_of="jax"),
    Row("ensemble of triton", "ensemble", step_of="triton"),
)


def row(name: str) -> Row:
    """Return the row of a name."""
    return next(one for one in (*ROWS, *SEQUENCES, *ENSEMBLES) if one.name == name)


def _model(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")


def _parameter(name: str, value: str) -> Mapping[str, Any]:
    return {name: {"string_value": value}}


class Station:
    """A row's model, loaded in a running server."""

    def __init__(self, server: RunningServer, client: Any, gate: Gate, row: Row) -> None:
        self.server = server
        self.client = self.asks = client
        """What loads, and what asks where a request names no client of its own."""
        self.url = server.url
        """Where clients of its own may ask."""
        self.gate = gate
        self.row = row
        self.of = row_of_step(row)
        """The row whose model has the queue."""
        self._numbers = itertools.count()

    @property
    def model(self) -> str:
        return _model(self.row.name)

    @property
    def instance(self) -> Any:
        """Return the instance that has the queue."""
        return self.server.application.registry.resolve(_model(self.of.name))[1]

    @property
    def statistics(self) -> Any:
        return self.server.application.registry.version(self.model, "1").statistics

    async def load(
        self,
        directory: Path,
        max_batch_size: int = 1,
        copies: int = 1,
        devices: Sequence[int] = (),
        **batching: Any,
    ) -> None:
        """Load it with a dynamic_batching; on devices where they are given, once on each."""
        row = self.of
        name = _model(row.name)
        config: dict[str, Any] = {**row.config}
        if row.export is None:
            config = {**_tensors(row), **config}
        if not row.unbatched:
            config["max_batch_size"] = max_batch_size
        if "sequence_batching" not in config:
            config["dynamic_batching"] = {**row.batching, **batching}
        if copies > 1:
            config["instance_group"] = [{"count": copies, "kind": "KIND_CPU"}]
        if devices:
            listed = ",".join(map(str, devices))
            config["parameters"] = {**config.get("parameters", {}), **_parameter("devices", listed)}
        version = directory / name / "1"
        if not version.exists():
            if row.export is not None:
                row.export(version, row)
            else:
                version.mkdir(parents=True)
            if row.code:
                begin = _BEGIN.format(path=self.gate.path)
                (version / "model.py").write_text(begin + row.code)
        (directory / name / "config.json").write_text(json.dumps(config))
        await self.client.load_model(name, config=json.dumps(config))
        self._hold()
        if self.row is not self.of:
            await self._load_ensemble(directory, max_batch_size)

    def _hold(self) -> None:
        instance, row = self.instance, self.of
        if row.is_helped:
            self.server.application.stations.helpers = cast("Any", _Busy())
        if row.device:
            instance.runner = _OnDevice(instance.runner, _Device(self.gate.path))
        else:
            row.hold(instance.runner, self.gate.path)
        # As of a load: a station that is renewed stays on its device, or off it.
        instance.station = self.server.application.stations.build(instance)

    async def _load_ensemble(self, directory: Path, max_batch_size: int) -> None:
        step = {
            "model_name": _model(self.of.name),
            "model_version": -1,
            "input_map": {"x": "x"},
            "output_map": {"y": "y"},
        }
        config = {
            **_tensors(self.row),
            "platform": "ensemble",
            "max_batch_size": max_batch_size,
            "ensemble_scheduling": {"step": [step]},
        }
        (directory / self.model / "1").mkdir(parents=True, exist_ok=True)
        (directory / self.model / "config.json").write_text(json.dumps(config))
        await self.client.load_model(self.model)

    @property
    def kind(self) -> str:
        """Return the name of its row in the table of stations."""
        stations = self.server.application.stations
        candidate = Candidate(stations, self.instance, None)
        return next(kind.name for kind in KINDS if kind.fits(candidate))

    def ask(
        self,
        value: float,
        *,
        seconds: float | None = None,
        client: Any = None,
        **parameters: Any,
    ) -> "asyncio.Task[float]":
        """Ask for a value times the factor; the task has the answer."""
        if self.row.around == "response cache":
            # Its own, so that its answer is no answer to another one.
            parameters["parameters"] = {"n": next(self._numbers)}
        shape = [1] if self.row.unbatched else [1, 1]
        tensor = triton.InferInput("x", shape, "FP32")
        tensor.set_data_from_numpy(np.full(shape, value, np.float32))
        how = self._stream if self.row.many else self._one
        asked = how(client or self.asks, [tensor], seconds, parameters)
        return asyncio.ensure_future(asked)

    async def _one(self, client: Any, inputs: Any, seconds: float | None, parameters: Any) -> float:
        answer: Any = await client.infer(self.model, inputs, client_timeout=seconds, **parameters)
        return float(answer.as_numpy("y").ravel()[0])

    async def _stream(
        self, client: Any, inputs: Any, seconds: float | None, parameters: Any
    ) -> float:
        async def sent() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": self.model, "inputs": inputs, **parameters}

        found: list[float] = []
        async for result, error in client.stream_infer(sent(), stream_timeout=seconds):
            if error is not None:
                raise error
            given = result.as_numpy("y")
            found += [] if given is None else given.ravel().tolist()
        return found[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to be so."""
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.001)

    async def pending(self, count: int) -> None:
        """Wait until so many requests wait in the queue, and as many as may have begun."""
        await self.until(lambda: self.instance.pending == count)

    async def refused(self, asked: "asyncio.Task[float]") -> None:
        """Wait until a request is refused, or would be if those before it were answered."""
        behind: Mapping[Any, Any] = getattr(self.instance.station, "_results", {})
        await self.until(lambda: asked.done() or bool(behind))

    async def in_progress(self, count: int) -> None:
        """Wait until so many requests have come and have not ended."""
        version = self.server.application.registry.version(_model(self.of.name), "1")
        await self.until(lambda: version.admission.in_progress == count)

    async def busy(self) -> "list[asyncio.Task[float]]":
        """Have it execute as much as it does at a time, so that all that comes later waits."""
        asked = []
        for count in range(1, self.of.in_progress + 1):
            asked.append(self.ask(0))
            await self.in_progress(count)
            await self.pending(0)
        await self.until(lambda: self.gate.held > 0)
        return asked

    async def idle(self) -> None:
        """Wait until nothing of it is executed, and hold what comes."""
        await self.until(lambda: not self.instance.users and not self.instance.pending)
        self.gate.close()


def row_of_step(of: Row) -> Row:
    """Return the row that has the queue of a row: its own, or of the step of an ensemble."""
    return row(of.step_of) if of.step_of else of
