"""Runs one replica of a Python model, as the main module of its process.

It executes the messages that arrive on a socket pair, and exits when the server closes its end.
"""

import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from xlaserve.errors import InvalidModel
from xlaserve.files.roots import Roots
from xlaserve.model_config.config import ModelConfig
from xlaserve.model_config.text import parse_json
from xlaserve.process.children import shield_from_signals
from xlaserve.process.endings import end_session_with_this, end_with_parent
from xlaserve.python_models import loading
from xlaserve.python_models.failures import described
from xlaserve.python_models.process.errors import named, raised
from xlaserve.python_models.process.loading import described as of_model
from xlaserve.python_models.process.pipe import Pipe, PipeError, plain
from xlaserve.python_models.process.printing import log_to
from xlaserve.python_models.process.slab import SlabReader, SlabWriter
from xlaserve.runtime.calls import Arrays, Change, NestedRequest, Replies, answered
from xlaserve.runtime.handling import NO_SENDER, AnswerParameters, TensorParameters
from xlaserve.runtime.host import PythonHost
from xlaserve.runtime.load_context import LoadContext
from xlaserve.runtime.metrics import Described, Metric, ModelMetrics
from xlaserve.tensors import Tensor


class ChildRequest:
    """A request in the model's process (implements ModelRequest)."""

    def __init__(self, number: int, fields: Mapping[str, Any], inputs: Arrays, pipe: Pipe) -> None:
        self.number = number
        self.id: str = fields["id"]
        self.rows: int = fields["rows"]
        self.outputs: Sequence[str] = fields["outputs"]
        self.parameters: Mapping[str, Any] = fields["parameters"]
        self.tensor_parameters = TensorParameters(*fields["tensor_parameters"])
        self.inputs = inputs
        self.sender = NO_SENDER
        self.is_cancelled = False
        self.is_writable = True
        self._pipe = pipe
        self._resume: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Tell the server that the model starts to execute this request."""
        self._send("begin", {})

    def answer(
        self,
        outputs: Mapping[str, Tensor],
        *,
        last: bool = True,
        parameters: AnswerParameters | None = None,
    ) -> None:
        """Send an answer; after a non-final one, the request is not writable until `go_on`."""
        self.is_writable = last
        self._send("answer", plain(outputs), last=last, parameters=parameters)

    def again(self) -> None:
        """Ask the server to reschedule the request."""
        self._send("again", {})

    def later(self) -> None:
        """Tell the server that the answer will be sent after this execution has returned."""
        self._send("later", {})

    def end(self) -> None:
        """Tell the server that the request has no more answers."""
        self._send("end", {})

    def fail(self, error: BaseException, *, whole: bool = False) -> None:
        """Fail the request with an error; `whole` says that it applies to the whole batch."""
        self._send("fail", {}, error=named(error), whole=whole)

    def when_writable(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the client can receive another answer, or has cancelled."""
        with self._lock:
            if not (self.is_writable or self.is_cancelled):
                self._resume = resume
                return
        resume()

    def when_cancelled(self, leave: Callable[[], None]) -> None:
        """Do nothing: model code polls `is_cancelled`."""

    def go_on(self, *, cancelled: bool) -> None:
        """Resume the model: the client can receive another answer, or has cancelled."""
        with self._lock:
            self.is_writable = True
            self.is_cancelled = self.is_cancelled or cancelled
            resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    def _send(self, kind: str, tensors: Mapping[str, Tensor], **more: Any) -> None:
        self._pipe.send({"kind": kind, "request": self.number, **more}, tensors)


class ChildCalls:
    """Calls to other models, sent through the server (implements Calls)."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._streams: dict[int, Replies] = {}

    def infer(self, request: NestedRequest, within: object) -> "Future[Arrays]":
        """Call a model for one answer."""
        return self._ask("call", _request_fields(request, within), plain(request.inputs))

    def stream(
        self, request: NestedRequest, within: object, replies: Replies | None = None
    ) -> Replies:
        """Call a decoupled model; the answers are put into the returned `Replies`."""
        number = next(self._numbers)
        found = Replies() if replies is None else replies
        found.on_taken = lambda: self._pipe.send({"kind": "taken", "call": number})
        found.on_cancel = lambda: self._pipe.send({"kind": "cancel", "call": number})
        self._streams[number] = found
        header = {"kind": "stream", "call": number, **_request_fields(request, within)}
        self._pipe.send(header, plain(request.inputs))
        return found

    def change(self, change: Change, within: object) -> "Future[None]":
        """Load or unload a model."""
        given = change.parameters.items()
        files = {n: np.frombuffer(v, np.uint8) for n, v in given if isinstance(v, bytes)}
        header = {
            "model": change.model,
            "is_load": change.is_load,
            "parameters": {name: value for name, value in given if name not in files},
            "within": _number(within),
        }
        return self._ask("change", header, files)

    def is_ready(self, model: str, version: str, within: object) -> bool:
        """Ask the server whether a model can answer now. Blocks."""
        header = {"model": model, "version": version, "within": _number(within)}
        found = self._ask("is_ready", header, {})
        return bool(found.result())

    def reply(self, number: int, outputs: Arrays) -> None:
        """Add an answer to a streaming call."""
        replies = self._streams.get(number)
        if replies is not None:
            replies.put(outputs)

    def end(self, number: int, error: tuple[str, str] | None, *, empty: bool) -> None:
        """End a streaming call; `empty` says that its final response had no outputs."""
        replies = self._streams.pop(number, None)
        if replies is not None:
            replies.is_end_empty = empty
            replies.end(None if error is None else raised(error))

    def settle(self, number: int, header: Mapping[str, Any], tensors: Arrays) -> None:
        """Complete a call with its answer or error."""
        waiting = self._waiting.pop(number)
        if header.get("error") is not None:
            waiting.set_exception(raised(header["error"]))
        elif "value" in header:
            waiting.set_result(header["value"])
        else:
            waiting.set_result(answered(tensors, header["parameters"]))

    def _ask(self, kind: str, header: Mapping[str, Any], tensors: Arrays) -> "Future[Any]":
        number = next(self._numbers)
        answer: Future[Any] = Future()
        self._waiting[number] = answer
        self._pipe.send({"kind": kind, "call": number, **header}, tensors)
        return answer


def _number(request: object) -> int | None:
    return request.number if isinstance(request, ChildRequest) else None


def _request_fields(request: NestedRequest, within: object) -> dict[str, Any]:
    return {
        "model": request.model,
        "version": request.version,
        "outputs": list(request.outputs),
        "id": request.id,
        "parameters": dict(request.parameters),
        "seconds": request.seconds,
        "within": _number(within),
    }


class ChildMetric(Metric):
    """A time series whose changes are also sent to the server."""

    tell: Callable[[str, float], None]

    def increment(self, by: float = 1) -> None:
        """Add `by` to a counter or gauge."""
        super().increment(by)
        self.tell("increment", by)

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        super().set(value)
        self.tell("set", value)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        super().observe(value)
        self.tell("observe", value)


class ChildMetrics(ModelMetrics):
    """Metrics that the server exposes for this process."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    def metric(
        self,
        owner: object,
        described: Described,
        labels: Mapping[str, str],
        bounds: Sequence[float] = (),
    ) -> Metric:
        """Return a series whose changes are sent to the server."""
        super().metric(owner, described, labels, bounds)
        found = ChildMetric(described.kind, bounds)
        header = {
            "kind": "metric",
            "name": described.name,
            "of": described.kind,
            "help": described.help,
            "labels": {str(name): str(value) for name, value in labels.items()},
            "bounds": list(bounds),
        }
        found.tell = lambda what, value: self._pipe.send({**header, "what": what, "value": value})
        return found


class Child:
    """Executes the server's messages."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._calls = ChildCalls(pipe)
        self._requests: dict[int, ChildRequest] = {}
        self._copy: Any = None

    def run(self) -> None:
        """Load the model and handle messages until the pipe is closed, which raises PipeError."""
        load_header, _ = self._pipe.receive()
        threading.Thread(target=self._load, args=(load_header,), daemon=True).start()
        while True:
            header, tensors = self._pipe.receive()
            if header["kind"] == "unload":
                threading.Thread(target=self._unload, daemon=True).start()
            else:
                getattr(self, f"_on_{header['kind']}")(header, tensors)

    def _load(self, header: Mapping[str, Any]) -> None:
        config = parse_json(header["config"]) if header["config"] else ModelConfig()
        context = LoadContext(
            header["model"],
            header["version"],
            replace(config, is_unbatched=header["is_unbatched"]),
            header["device"],
            roots=Roots(tuple(map(Path, header["roots"]))),
            python=PythonHost(self._calls, ChildMetrics(self._pipe)),
        )
        try:
            made = loading.make_here(Path(header["directory"]), context)
            self._copy = made.make(header["replica"])
            self._copy.load()
            if getattr(self._copy, "readiness", None) is not None:
                structlog.get_logger("python").warning(
                    "is_ready ignored: a model in a process is ready once loaded",
                    model=context.model,
                )
        except InvalidModel as error:
            self._pipe.send({"kind": "failed", "text": str(error)})
        except BaseException as error:
            self._pipe.send({"kind": "failed", "text": f"its code raised {described(error)}"})
        else:
            header = of_model(made.info, is_batched=made.is_batched, concurrency=made.concurrency)
            self._pipe.send({"kind": "loaded", **header})

    def _unload(self) -> None:
        self._copy.close()
        os._exit(0)

    def _on_requests(self, header: Mapping[str, Any], tensors: Arrays) -> None:
        requests, start = [], iter(tensors.items())
        for number, fields in header["requests"]:
            inputs = {name: next(start)[1] for name in fields["inputs"]}
            self._requests[number] = request = ChildRequest(number, fields, inputs, self._pipe)
            requests.append(request)
        freed = partial(self._freed, header["group"])
        self._copy.handle(requests, freed, together=header["together"])

    def _freed(self, group: int) -> None:
        self._pipe.send({"kind": "freed", "group": group})

    def _on_go_on(self, header: Mapping[str, Any], tensors: Arrays) -> None:
        request = self._requests.get(header["request"])
        if request is not None:
            request.go_on(cancelled=header["cancelled"])

    def _on_over(self, header: Mapping[str, Any], tensors: Arrays) -> None:
        for number in header["requests"]:
            request = self._requests.pop(number, None)
            if request is not None:
                request.go_on(cancelled=True)

    def _on_called(self, header: Mapping[str, Any], tensors: Arrays) -> None:
        self._calls.settle(header["call"], header, tensors)

    def _on_reply(self, header: Mapping[str, Any], tensors: Arrays) -> None:
        self._calls.reply(header["call"], answered(tensors, header["parameters"]))

    def _on_replied(self, header: Mapping[str, Any], tensors: Arrays) -> None:
        self._calls.end(header["call"], header["error"], empty=header["empty"])


def main(parent: int, descriptor: int, inward: int, outward: int) -> None:
    """Serve the pipe and slabs with these descriptors, then exit the process."""
    # The kernel kills this process with the server, even if the model's code hangs.
    end_with_parent(parent)
    end_session_with_this()
    shield_from_signals()
    # A pipe is buffered by blocks: without this, the log gets lines after 8 KiB or at the end.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    end = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    reader = SlabReader(inward, writable=True) if inward >= 0 else None
    writer = SlabWriter(outward) if outward >= 0 else None
    for slab in (inward, outward):
        if slab >= 0:
            os.close(slab)
    # Forked children must not use the pipe, and are killed when this process ends.
    os.register_at_fork(after_in_child=end.close)
    os.register_at_fork(after_in_child=end_with_parent)
    pipe = Pipe(end, writer, reader)
    log_to(pipe)
    try:
        Child(pipe).run()
    except PipeError:
        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
