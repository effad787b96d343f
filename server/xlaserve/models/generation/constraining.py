"""The requests of a model whose grammars are compiled before they wait for a slot."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from xlaserve.code_errors import ModelFailed
from xlaserve.errors import InvalidParameter
from xlaserve.language.grammars import Grammars
from xlaserve.models.generation.constraint import Grammar
from xlaserve.models.generation.running import Running


class Constraining:
    """Compiles grammars in a thread of its own, one after another.

    That takes a millisecond, and up to a second for what somebody makes large on purpose: neither
    the event loop nor the steps of other requests wait for it.
    """

    def __init__(self, model: str, grammars: Grammars | None, add: Callable[[Running], None]):
        self._model = model
        self._grammars = grammars
        self._add = add
        self._thread: ThreadPoolExecutor | None = None
        if grammars is not None:
            self._thread = ThreadPoolExecutor(1, f"grammars {model}")

    def add(self, running: Running) -> None:
        """Have a request wait for a slot, behind its grammar. Raises InvalidParameter."""
        grammar = running.asked.grammar
        if grammar is None:
            self._add(running)
            return
        if self._thread is None:
            expected = "none, since the configuration of the model has no parameter 'grammars'"
            raise InvalidParameter(grammar.parameter, expected, "one")
        try:
            self._thread.submit(self._compile, running, grammar)
        except RuntimeError as error:  # it is closed
            raise ModelFailed(self._model, "it is being unloaded") from error

    def close(self) -> None:
        """End the thread, behind what it was given."""
        if self._thread is not None:
            self._thread.shutdown()

    def _compile(self, running: Running, grammar: Grammar) -> None:
        try:
            if self._grammars is not None and not running.request.is_cancelled:
                running.constraint = self._grammars.compile(*grammar)
        # Whatever it is, its request alone ends with it.
        except Exception as error:
            running.request.fail(error)
            running.freed()
        else:
            self._add(running)
