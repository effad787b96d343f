"""Calls executed on behalf of others, which share the answer."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from xlaserve.serving.call import Call, Observer, Outcome
from xlaserve.serving.infer_call import Executed, InferCall, Relayed
from xlaserve.serving.inference import InferResponse

Completed: TypeAlias = "Callable[[Relay, InferResponse | BaseException], None]"
"""Called on the event loop with the outcome of a relay: its answer, or the error."""


class Relay(InferCall):
    """An inference like that of a call that was admitted; it passes no gate of its own.

    It counts neither as a call in progress nor as a user of the instance: calls wait for it. Its
    execution is counted, and its failure is not: each call that waits fails by itself.
    """

    def __init__(self, call: InferCall, counting: Observer, completed: Completed) -> None:
        self.model, self.version, self.id = call.model, call.version, call.id
        self.headers, self.peer, self.principal = call.headers, call.peer, call.principal
        self.parent, self.client, self.sight = call.parent, call.client, call.sight
        self.found, self.instance, self.is_found = call.found, call.instance, True
        self.inputs, self.parameters = call.inputs, call.parameters
        self.tensor_parameters = call.tensor_parameters
        self.is_volatile, self.reads_memory = call.is_volatile, call.reads_memory
        self.rows, self.key, self.chosen = call.rows, call.key, call.chosen
        self.started_ns, self.submitted_ns = call.started_ns, call.submitted_ns
        self.has_begun = True
        self.uses = set()
        self._observers = (OnlyExecutions(counting),)
        self._completed = completed

    @property
    def how(self) -> Relayed:
        """Return how it was answered without an execution of its own: a cache hit or miss."""
        return self.outcome if type(self.outcome) is Relayed else Relayed()

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Hand the answer on."""
        self._completed(self, response)

    def refuse(self, error: BaseException) -> None:
        """Pass the error on."""
        self._completed(self, error)


class OnlyExecutions:
    """Counts executions as another observer does, and no failures (an Observer).

    What the cache has to do with the answer is counted with the calls that wait for it.
    """

    __slots__ = ("_counting",)

    began = None

    def __init__(self, counting: Observer) -> None:
        self._counting = counting

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        """See calls that ended together."""
        if type(outcome) is Executed:
            self._counting.ended(calls, outcome)
