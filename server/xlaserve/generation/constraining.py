"""The requests of a model whose grammars are compiled before they wait for a slot."""

from collections.abc import Callable
from functools import partial

from xlaserve.errors import InvalidParameter
from xlaserve.errors.code import ModelFailed
from xlaserve.errors.panics import answerable
from xlaserve.generation.running import Running
from xlaserve.language.grammars import Grammars
from xlaserve.language.turns import CallerThread


class Constraining:
    """Compiles grammars in a thread of its own, one after another, in turns of their callers.

    That takes a millisecond, and a tenth of a second for what is large on purpose, and refused:
    neither the event loop nor the steps of other requests wait for it. No more wait here than a
    model is handed ahead of its slots.
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
        """Queue a request for a slot, after compiling its grammar. Raises InvalidParameter."""
        grammar = running.asked.grammar
        if grammar is None:
            self._add(running)
            return
        if self._thread is None:
            expected = "none, since the model's configuration lacks the parameter 'grammars'"
            raise InvalidParameter(grammar.parameter, expected, "one")
        try:
            self._thread.submit(running.sender.caller, partial(self._compile, running))
        except RuntimeError as error:  # it is closed
            raise ModelFailed(self._model, "it is being unloaded") from error

    def close(self) -> None:
        """End the process of grammars, and the thread after its queued work."""
        if self._grammars is not None:
            self._grammars.close()
        if self._thread is not None:
            self._thread.close()

    def _compile(self, running: Running) -> None:
        try:
            grammar = running.asked.grammar
            if self._grammars is not None and grammar and not running.request.is_cancelled:
                charge = partial(running.request.charge, "the grammar")
                running.constraint = self._grammars.compile(*grammar, charge)
        # Whatever it is, its request alone ends with it.
        except BaseException as error:
            running.request.fail(answerable(error))
            running.freed()
        else:
            self._add(running)
