"""The requests of a model whose grammars are compiled before they wait for a slot."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from xlaserve.code_errors import ModelFailed
from xlaserve.errors import InvalidParameter
from xlaserve.language.grammars import Grammars
from xlaserve.models.generation.charged import Charged
from xlaserve.models.generation.running import Running


class Constraining:
    """Compiles grammars in a thread of its own, one after another, in turns of their callers.

    That takes a millisecond, and a tenth of a second for what is large on purpose, and refused:
    neither the event loop nor the steps of other requests wait for it. No more wait here than a
    model is handed ahead of its slots.
    """

    def __init__(self, model: str, grammars: Grammars | None, add: Callable[[Running], None]):
        self._model = model
        self._grammars = grammars
        self._add = add
        self._waiting: Charged[Running] = Charged()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: ThreadPoolExecutor | None = None
        if grammars is not None:
            self._thread = ThreadPoolExecutor(1, f"grammars {model}")
            self._thread.submit(grammars.begin)

    def add(self, running: Running) -> None:
        """Have a request wait for a slot, behind its grammar. Raises InvalidParameter."""
        grammar = running.asked.grammar
        if grammar is None:
            self._add(running)
            return
        if self._thread is None:
            expected = "none, since the configuration of the model has no parameter 'grammars'"
            raise InvalidParameter(grammar.parameter, expected, "one")
        with self._lock:
            if self._is_closed:
                raise ModelFailed(self._model, "it is being unloaded")
            self._waiting.add(running.sender.principal, running)
            self._thread.submit(self._compile_next)

    def close(self) -> None:
        """End the thread, behind what it was given."""
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown()
        if self._grammars is not None:
            self._grammars.close()

    def _compile_next(self) -> None:
        caller, running = self._waiting.take()
        begun_ns = time.perf_counter_ns()
        try:
            grammar = running.asked.grammar
            if self._grammars is not None and grammar and not running.request.is_cancelled:
                running.constraint = self._grammars.compile(*grammar)
        # Whatever it is, its request alone ends with it.
        except BaseException as error:
            running.request.fail(error)
            running.freed()
        else:
            self._add(running)
        finally:
            self._waiting.charge(caller, time.perf_counter_ns() - begun_ns)
