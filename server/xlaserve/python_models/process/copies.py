"""A replica of a Python model in its own process: the server's side."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import structlog

from xlaserve.errors import InvalidModel
from xlaserve.errors.code import ModelFailed, ProcessAbsent, ProcessLost
from xlaserve.errors.panics import answerable
from xlaserve.python_models.copies import UNLOAD_SECONDS, Freed
from xlaserve.python_models.inputs import on_host
from xlaserve.python_models.process.beginning import Beginning
from xlaserve.python_models.process.errors import raised
from xlaserve.python_models.process.pipe import MessageTooLarge, Pipe, PipeError
from xlaserve.python_models.process.printing import ProcessLog
from xlaserve.python_models.process.running import RunningProcess
from xlaserve.python_models.process.services import Header, Services
from xlaserve.python_models.readiness import PresentReadiness
from xlaserve.runtime.calls import Arrays
from xlaserve.runtime.handling import AnswerParameters, ModelRequest
from xlaserve.tensors import Tensor

_log: Any = structlog.get_logger("python")

_POLL_SECONDS = 0.25
_NOTED_BYTES = 1 << 20
"""A change of the process's memory is reported only above this size."""
_LEAST_PAUSE_SECONDS = 0.1
_MOST_PAUSE_SECONDS = 30.0
"""Maximum backoff before a dead process is restarted; it doubles while the process keeps dying
early."""

_WORDS = frozenset(("again", "end", "later"))
"""Kinds of messages that call the ModelRequest method of the same name."""


class _ToBeEnded(Exception):
    """The process has to be killed; the text is the reason."""


@dataclass(slots=True)
class _Group:
    requests: dict[int, ModelRequest]
    freed: Freed
    open: set[int] = field(default_factory=set)
    """Requests that have not ended."""
    begun: set[int] = field(default_factory=set)
    """Requests whose execution the process has announced."""
    notified: set[int] = field(default_factory=set)
    """Requests that the process knows to be cancelled."""
    is_freed: bool = False
    is_together: bool = False
    """Whether the process executes the requests as one batch."""


class ProcessCopy:
    """Sends requests to a process, and restarts the process when it dies (implements Copy)."""

    def __init__(self, beginning: Beginning) -> None:
        self._beginning = beginning
        self._name = beginning.model
        self._log: Any = _log.bind(model=self._name)
        self.loaded: Future[Mapping[str, Any]] = Future()
        """The process's description of the model, set after the first load."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        """Guards `_groups` and `_pipe`."""
        self._groups: dict[int, _Group] = {}
        self._pipe: Pipe | None = None
        """The pipe to the process; None while no process accepts requests."""
        self._process: RunningProcess | None = None
        self._is_closing = False
        self._heard = time.monotonic()
        self._paused: set[int] = set()
        """Requests paused until the client reads (backpressure)."""
        self._lost = ""
        self._is_stopped = False
        """Whether the process has been stopped (SIGSTOP), and so receives no requests."""
        self.readiness = PresentReadiness(lambda: self._pipe is not None and not self._is_stopped)
        self.resident_bytes = 0
        """Last measured memory of the process; 0 if unknown."""
        self.on_memory: Callable[[], None] = lambda: None
        """Called in the reader thread when a measurement has changed `resident_bytes`."""
        self._outgoing: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        title = f"python {self._name} {beginning.header['replica']}"
        # This thread must outlive the process: the kernel kills a child when the thread that
        # started it exits.
        self._reader = threading.Thread(target=self._run, name=title, daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"{title} out", daemon=True)

    def load(self) -> None:
        """Start the process; raises InvalidModel if it cannot load the model. Blocks."""
        self._reader.start()
        self._writer.start()
        while True:
            try:
                self.loaded.result(_POLL_SECONDS)
            except NotYet:
                self._beginning.check_cancelled()
            else:
                return

    def handle(
        self, requests: Sequence[ModelRequest], freed: Freed, *, together: bool = True
    ) -> None:
        """Send requests to the process; fail them if no process is running."""
        numbered = {next(self._numbers): request for request in requests}
        number = next(self._numbers)
        with self._lock:
            pipe = None if self._is_stopped else self._pipe
            if pipe is not None:
                group = _Group(numbered, freed, set(numbered), is_together=together)
                self._groups[number] = group
                if len(self._groups) == 1:
                    self._heard = time.monotonic()
        if pipe is None:
            why = "it is stopped (SIGSTOP)" if self._is_stopped else self._lost
            why = why or "no process is running"
            for request in requests:
                request.fail(ProcessAbsent(self._name, why))
            freed()
            return
        self._outgoing.put(partial(self._send_requests, pipe, number, numbered, together=together))

    def close(self) -> None:
        """Unload the model in the process, then end the process. Blocks."""
        self._is_closing = True
        process, pipe = self._process, self._pipe
        if process is not None:
            if pipe is not None:
                # The writer thread sends it, because sending to a stopped process would block.
                self._enqueue(pipe, {"kind": "unload"}, {})
                process.wait(UNLOAD_SECONDS)
            process.kill()
        self._outgoing.put(None)
        if self._reader.ident is not None:
            self._reader.join(UNLOAD_SECONDS)

    # --- reader thread, which also starts the process ---

    def _run(self) -> None:
        pause = _LEAST_PAUSE_SECONDS
        while not self._is_closing:
            started = time.monotonic()
            reason = self._life()
            self._fail_all(reason)
            if self._is_closing:
                return
            if not self.loaded.done():
                self.loaded.set_exception(InvalidModel(reason))
                return
            self._log.error("model process lost", reason=reason, restart_in_seconds=pause)
            if time.monotonic() - started > _MOST_PAUSE_SECONDS:
                pause = _LEAST_PAUSE_SECONDS
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_SECONDS)

    def _life(self) -> str:
        """Run one process until it ends, and return the reason."""
        try:
            shared_bytes = self._beginning.host.shared_bytes
            lines = ProcessLog(self._log)
            process = RunningProcess(lines, _POLL_SECONDS, shared_bytes)
        except OSError as error:
            return f"its process could not start: {error.strerror}"
        except BaseException as error:
            # Always return a reason: `load` waits for it.
            self._log.exception("model process not started")
            return f"its process could not start: {type(error).__name__}"
        self._process, self._is_stopped = process, False
        if self._is_closing:
            process.kill()
        pipe = process.pipe
        services = Services(
            self._beginning,
            partial(self._enqueue, pipe),
            self._found,
            self._has_been_heard,
            lines,
        )
        reason = ""
        pipe.on_silence = partial(self._check, process, services)
        try:
            pipe.send(self._beginning.header)
            reason = self._listen(process, services)
        except _ToBeEnded as found:
            reason = str(found)
        except PipeError:
            pass
        except BaseException:
            self._log.exception("invalid message from model process")
            reason = "it sent an invalid message"
        finally:
            with self._lock:
                self._pipe, self._is_stopped = None, False
            reason = process.end(reason)
            services.close()
        return reason

    def _listen(self, process: RunningProcess, services: Services) -> str:
        """Handle messages until an exception ends the loop; return the text of a failed load."""
        polled_at = time.monotonic()
        while True:
            try:
                message = process.pipe.receive()
            except TimeoutError:
                message = None
            if time.monotonic() - polled_at >= _POLL_SECONDS:
                polled_at = time.monotonic()
                self._tell_cancelled(process.pipe)
                self._measure(process)
            if message is not None:
                self._has_been_heard()
                header, tensors = message
                if header["kind"] == "failed":
                    return str(header["text"])
                self._take(process.pipe, services, header, tensors)

    def _take(self, pipe: Pipe, services: Services, header: Header, tensors: Arrays) -> None:
        kind = header["kind"]
        if kind == "loaded":
            with self._lock:
                self._pipe, self._lost = pipe, ""
            assert self._process is not None
            self.resident_bytes = self._process.resident_bytes
            if not self.loaded.done():
                self.loaded.set_result(header)
            return
        asks = getattr(services, f"on_{kind}", None)
        if asks is not None:
            asks(header, tensors)
        else:
            name = "_on_word" if kind in _WORDS else f"_on_{kind}"
            getattr(self, name)(pipe, header, tensors)

    def _measure(self, process: RunningProcess) -> None:
        """Measure the memory of the process; raise _ToBeEnded if it exceeds the limit."""
        held, limit = process.resident_bytes, self._beginning.host.process_bytes
        if limit and held > limit:
            excess = f"it held {held} bytes, more than {limit} (python_process_bytes)"
            raise _ToBeEnded(f"{excess}, and was killed")
        if abs(held - self.resident_bytes) > _NOTED_BYTES:
            self.resident_bytes = held
            self.on_memory()

    def _check(self, process: RunningProcess, services: Services) -> None:
        """Raise PipeError if the process has ended, _ToBeEnded if it is stopped or overdue."""
        stopped = process.stopped
        stopped.look()
        if stopped.is_over:
            raise _ToBeEnded(f"it was stopped for {stopped.seconds:.0f} seconds and was killed")
        self._is_stopped = stopped.is_long
        # A forked child of the process may keep the pipe open.
        if process.has_ended:
            raise PipeError("the process has ended")
        if reason := self._is_overdue(services):
            raise _ToBeEnded(reason)

    def _has_been_heard(self) -> None:
        self._heard = time.monotonic()
        self._is_stopped = False

    def _tell_cancelled(self, pipe: Pipe) -> None:
        """Tell the process which of its requests have been cancelled."""
        for key, group in list(self._groups.items()):
            for number in group.open - group.notified:
                if group.requests[number].is_cancelled:
                    group.notified.add(number)
                    header = {"kind": "go_on", "request": number, "cancelled": True}
                    self._enqueue(pipe, header, {})
            self._drop(key, pipe)

    def _is_overdue(self, services: Services) -> str:
        """Return the reason to kill the process if it is overdue, else an empty string."""
        limit = self._beginning.seconds
        # A process may be silent while it waits for other models or for slow clients.
        is_due = not services.are_awaited and any(
            not group.is_freed or group.open - self._paused for group in list(self._groups.values())
        )
        if not (limit and is_due):
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > limit:
            return f"it was silent for {limit:g} seconds (python_process_seconds) and was killed"
        return ""

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            self._lost = reason
            groups, self._groups = self._groups, {}
        for group in groups.values():
            for number in group.open:
                lost = ProcessLost if number in group.begun else ProcessAbsent
                group.requests[number].fail(lost(self._name, reason))
            if not group.is_freed:
                group.freed()

    # --- messages from the process ---

    def _found(self, number: int) -> ModelRequest | None:
        # Copy the dict: the event loop adds groups concurrently.
        for group in list(self._groups.values()):
            if number in group.open:
                return group.requests[number]
        return None

    def _on_begin(self, pipe: Pipe, header: Header, tensors: Arrays) -> None:
        number = header["request"]
        for group in list(self._groups.values()):
            if number in group.open:
                group.begun.add(number)
                group.requests[number].begin()

    def _on_answer(self, pipe: Pipe, header: Header, tensors: Arrays) -> None:
        number = header["request"]
        request = self._found(number)
        if request is None:
            return
        fields = header["parameters"]
        parameters = None if fields is None else AnswerParameters(*fields)
        if header["last"]:
            request.answer(tensors, parameters=parameters)
            self._ended(pipe, number)
            return
        request.answer(tensors, last=False, parameters=parameters)
        self._paused.add(number)
        request.when_writable(partial(self._go_on, pipe, number, request))

    def _on_word(self, pipe: Pipe, header: Header, tensors: Arrays) -> None:
        """Handle a message that consists of a request number and a method name."""
        request, word = self._found(header["request"]), header["kind"]
        if request is not None:
            getattr(request, word)()
            if word != "later":
                self._ended(pipe, header["request"])

    def _on_fail(self, pipe: Pipe, header: Header, tensors: Arrays) -> None:
        request = self._found(header["request"])
        if request is not None:
            request.fail(raised(header["error"]), whole=header["whole"])
            self._ended(pipe, header["request"])

    def _on_freed(self, pipe: Pipe, header: Header, tensors: Arrays) -> None:
        group = self._groups.get(header["group"])
        if group is not None:
            group.is_freed = True
            self._drop(header["group"], pipe)
            group.freed()

    # --- messages to the process ---

    def _send_requests(
        self, pipe: Pipe, number: int, requests: Mapping[int, ModelRequest], *, together: bool
    ) -> None:
        try:
            described, tensors = _of_requests(requests)
            header = {
                "kind": "requests",
                "group": number,
                "requests": described,
                "together": together,
            }
            pipe.send(header, tensors)
        except MessageTooLarge as error:
            self._refuse(number, ModelFailed(self._name, str(error)))
        except PipeError:
            pipe.close()  # the reader thread fails the requests
        # A request could not be serialized; nothing was sent, so the process is unaffected.
        except BaseException as error:
            self._refuse(number, answerable(error))

    def _refuse(self, number: int, error: Exception) -> None:
        with self._lock:
            group = self._groups.pop(number, None)
        if group is not None:
            for request in group.requests.values():
                request.fail(error, whole=group.is_together)
            group.freed()

    def _go_on(self, pipe: Pipe, number: int, request: ModelRequest) -> None:
        self._heard = time.monotonic()
        self._paused.discard(number)
        header = {"kind": "go_on", "request": number, "cancelled": request.is_cancelled}
        self._enqueue(pipe, header, {})

    def _enqueue(
        self, pipe: Pipe, header: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self._outgoing.put(partial(_send, pipe, header, tensors))

    def _ended(self, pipe: Pipe, number: int) -> None:
        for key, group in list(self._groups.items()):
            if number in group.open:
                group.open.discard(number)
                self._drop(key, pipe)

    def _drop(self, key: int, pipe: Pipe) -> None:
        group = self._groups[key]
        # The process does not report the end of a request that it knows to be cancelled.
        if group.is_freed and not group.open - group.notified:
            with self._lock:
                self._groups.pop(key, None)
            self._paused.difference_update(group.requests)
            header = {"kind": "over", "requests": list(group.requests)}
            self._enqueue(pipe, header, {})

    def _write(self) -> None:
        while (send := self._outgoing.get()) is not None:
            send()
            del send


def _of_requests(
    requests: Mapping[int, ModelRequest],
) -> tuple[list[tuple[int, dict[str, Any]]], dict[str, Tensor]]:
    """Return the requests in message form, and their tensors by "<number> <input>"."""
    described, tensors = [], {}
    for key, request in requests.items():
        inputs = on_host(request.inputs)
        fields = {
            "id": request.id,
            "rows": request.rows,
            "outputs": list(request.outputs),
            "parameters": dict(request.parameters),
            "tensor_parameters": [dict(one) for one in request.tensor_parameters],
            "inputs": list(inputs),
        }
        described.append((key, fields))
        tensors.update({f"{key} {name}": array for name, array in inputs.items()})
    return described, tensors


def _send(pipe: Pipe, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    try:
        pipe.send(header, tensors)
    except MessageTooLarge:
        # The process would wait forever for this message.
        pipe.close()
    except PipeError:
        return
    except BaseException:
        _log.exception("message to model process not written")
        pipe.close()
