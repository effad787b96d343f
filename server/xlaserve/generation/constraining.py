"""Compilation of requests' grammars, before they are queued for a slot."""

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from xlaserve.errors import InvalidParameter
from xlaserve.errors.code import ModelFailed
from xlaserve.errors.panics import answerable
from xlaserve.generation.running import Running
from xlaserve.language.grammars import Grammars
from xlaserve.language.turns import CallerThread


class Constraining:
    """Compiles grammars on a separate thread, with fair scheduling between callers.

    Compiling usually takes a millisecond, and up to a tenth of a second for grammars that are then
    refused as too large. A grammar that grows during its answer is compiled again. The thread keeps
    that off the event loop and the generation thread. The number of queued requests is bounded,
    since a model is handed only a few more than its slots.
    """

    def __init__(
        self, model: str, grammars: Grammars | None, add: Callable[[Running], None], waiting: int
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._add = add
        self._thread: CallerThread | None = None
        if grammars is not None:
            self._thread = CallerThread("grammars", model, waiting)
            self._thread.submit("", grammars.begin)

    def add(self, running: Running) -> None:
        """Queue a request for a slot, after compiling its grammar, if any. Does not wait for that.

        Raises InvalidParameter, or ModelFailed while the model is being unloaded.
        """
        grammar = running.parameters.grammar
        if grammar is None:
            self._add(running)
            return
        if self._thread is None:
            expected = "none, since the model's configuration lacks the parameter 'grammars'"
            raise InvalidParameter(grammar.parameter, expected, "one")
        self._submit(running, partial(self._compile, running))

    def _submit(self, running: Running, call: Callable[[], None]) -> "Future[None]":
        assert self._thread is not None
        try:
            return self._thread.submit(running.sender.caller, call)
        except RuntimeError as error:  # the thread has been closed
            raise ModelFailed(self._model, "it is being unloaded") from error

    def _grow(self, running: Running) -> "Future[None]":
        """Let the grammar of an answer grow; its steps are paused meanwhile."""
        assert running.constraint is not None
        return self._submit(running, running.constraint.grow)

    def close(self) -> None:
        """End the grammar subprocess, and the thread after its queued work."""
        if self._grammars is not None:
            self._grammars.close()
        if self._thread is not None:
            self._thread.close()

    def _compile(self, running: Running) -> None:
        try:
            grammar = running.parameters.grammar
            if self._grammars is not None and grammar and not running.request.is_cancelled:
                charge = partial(running.request.charge, "the grammar")
                running.constraint = self._grammars.compile(*grammar, charge)
                running.grow = partial(self._grow, running)
        # The error concerns only this request.
        except BaseException as error:
            running.request.fail(answerable(error))
            running.freed()
        else:
            self._add(running)
