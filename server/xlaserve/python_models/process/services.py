"""Handles requests from a model's process: calls to other models, metrics, log records."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

import structlog

from xlaserve.errors.code import CancelledByModel
from xlaserve.python_models.process.beginning import Beginning
from xlaserve.python_models.process.errors import named
from xlaserve.python_models.process.printing import ProcessLog
from xlaserve.python_models.process.streams import Send, Streams
from xlaserve.runtime.calls import Arrays, Change, NestedRequest, parameters_of
from xlaserve.runtime.handling import ModelRequest
from xlaserve.runtime.metrics import Described, MetricError

Header: TypeAlias = Mapping[str, Any]

_CHANGES = {"set": "set", "observe": "observe"}


class Services:
    """Handles everything that one process asks of the server.

    There is one method per kind of message, named `on_<kind>`; the reader thread calls them.
    """

    def __init__(
        self,
        beginning: Beginning,
        send: Send,
        find: Callable[[int], ModelRequest | None],
        on_completed: Callable[[], None],
        lines: ProcessLog,
    ) -> None:
        """`find` returns a request that has not ended; `on_completed` is called after each call."""
        self._host = beginning.host
        self._beginning = beginning
        self._send = send
        self._find = find
        self._heard = on_completed
        self._lines = lines
        self._lock = threading.Lock()
        """Guards `_calling`."""
        self._calling = 0
        self._streams = Streams()
        self._log: Any = structlog.get_logger("python").bind(model=beginning.model)

    @property
    def are_awaited(self) -> bool:
        """Tell whether the process waits for a call to another model."""
        return bool(self._calling) or self._streams.are_awaited

    def close(self) -> None:
        """Cancel streaming calls to other models: the process has ended."""
        self._streams.close()

    def on_call(self, header: Header, tensors: Arrays) -> None:
        """Call another model for one answer."""
        if not self._refuses(header):
            request = _nested_request(header, tensors)
            self._await(header, self._host.calls.infer(request, self._within(header)))

    def on_stream(self, header: Header, tensors: Arrays) -> None:
        """Call a decoupled model."""
        replies = self._streams.begin(header["call"], self._send)
        if self._is_part_of_nothing(header):
            replies.end(CancelledByModel(header["model"], "the request has ended"))
            return
        self._host.calls.stream(_nested_request(header, tensors), self._within(header), replies)

    def on_taken(self, header: Header, tensors: Arrays) -> None:
        """Record that the process has consumed an answer of a streaming call."""
        self._streams.taken(header["call"])

    def on_cancel(self, header: Header, tensors: Arrays) -> None:
        """Cancel a streaming call."""
        self._streams.cancel(header["call"])

    def on_change(self, header: Header, tensors: Arrays) -> None:
        """Load or unload a model; file contents are sent as tensors."""
        files = {name: array.tobytes() for name, array in tensors.items()}
        change = Change(
            self._beginning.model,
            header["model"],
            header["is_load"],
            {**header["parameters"], **files},
        )
        if not self._refuses(header):
            self._await(header, self._host.calls.change(change, self._within(header)))

    def on_is_ready(self, header: Header, tensors: Arrays) -> None:
        """Answer whether a model can answer requests now."""
        within = self._within(header)
        ready = self._host.calls.is_ready(header["model"], header["version"], within)
        self._send({"kind": "called", "call": header["call"], "value": ready}, {})

    def on_log(self, header: Header, tensors: Arrays) -> None:
        """Write a log record."""
        self._lines.logged(header["level"], header["event"], header["fields"])

    def on_metric(self, header: Header, tensors: Arrays) -> None:
        """Update a metric."""
        described = Described(header["name"], header["of"], header["help"])
        owner = self._beginning.owner
        try:
            found = self._host.metrics.metric(owner, described, header["labels"], header["bounds"])
            getattr(found, _CHANGES.get(header["what"], "increment"))(header["value"])
        except MetricError as error:
            self._log.warning("model metric refused", reason=str(error))

    def _within(self, header: Header) -> ModelRequest | None:
        within = header["within"]
        return None if within is None else self._find(within)

    def _is_part_of_nothing(self, header: Header) -> bool:
        """Tell whether the request that the call belongs to has already ended."""
        return header["within"] is not None and self._find(header["within"]) is None

    def _refuses(self, header: Header) -> bool:
        is_refused = self._is_part_of_nothing(header)
        if is_refused:
            error = named(CancelledByModel(header["model"], "the request has ended"))
            self._send({"kind": "called", "call": header["call"], "error": error}, {})
        return is_refused

    def _await(self, header: Header, answer: "Future[Any]") -> None:
        with self._lock:
            self._calling += 1
        answer.add_done_callback(partial(self._called, header["call"]))

    def _called(self, number: int, answer: "Future[Any]") -> None:
        with self._lock:
            self._calling -= 1
        self._heard()
        header: dict[str, Any] = {"kind": "called", "call": number}
        try:
            found = answer.result()
            outputs = {} if found is None else found
            header["parameters"] = parameters_of(outputs)
        except BaseException as error:  # any error must reach the code, which waits for an answer
            header["error"], outputs = named(error), {}
        self._send(header, outputs)


def _nested_request(header: Header, tensors: Arrays) -> NestedRequest:
    return NestedRequest(
        header["model"],
        tensors,
        header["version"],
        header["outputs"],
        header["id"],
        header["parameters"],
        header["seconds"],
    )
