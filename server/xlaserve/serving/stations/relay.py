"""Calls executed on behalf of others, which get their answer."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from xlaserve.serving.call import Call, Observer, Outcome
from xlaserve.serving.infer_call import Executed, InferCall, Relayed
from xlaserve.serving.inference import InferResponse

Completed: TypeAlias = "Callable[[Relay, InferResponse | BaseException], None]"
"""Called on the event loop with a relay and its answer or error."""


class Relay(InferCall):
    """Executes the inference of an admitted call on its behalf; it passes no gates.

    Counts neither as a call in progress nor as a user of the instance, because the calls waiting
    for it do. Its execution is counted, its failure is not: every waiting call fails by itself.
    """

    def __init__(self, call: InferCall, counting: Observer, completed: Completed) -> None:
        self.model, self.version, self.id = call.model, call.version, call.id
        self.headers, self.peer, self.principal = call.headers, call.peer, call.principal
        self.parent, self.client, self.sight = call.parent, call.client, call.sight
        self.found, self.instance, self.is_found = call.found, call.instance, True
        self.inputs, self.parameters = call.inputs, call.parameters
        self.tensor_parameters = call.tensor_parameters
        self.is_volatile, self.read_from = call.is_volatile, call.read_from
        self.rows, self.key, self.chosen = call.rows, call.key, call.chosen
        self.started_ns, self.submitted_ns = call.started_ns, call.submitted_ns
        self.has_begun = True
        self.uses = set()
        self._observers = (OnlyExecutions(counting),)
        self._completed = completed

    @property
    def how(self) -> Relayed:
        """Return how the relay was answered: by a cache hit or miss, if an inner station caches."""
        return self.outcome if type(self.outcome) is Relayed else Relayed()

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Pass the answer on."""
        self._completed(self, response)

    def refuse(self, error: BaseException) -> None:
        """Pass the error on."""
        self._completed(self, error)


class OnlyExecutions:
    """Forwards executions to another observer, and ignores failures (an Observer).

    Cache hits and misses are counted with the waiting calls.
    """

    __slots__ = ("_counting",)

    began = None

    def __init__(self, counting: Observer) -> None:
        self._counting = counting

    def ended(self, calls: Sequence[Call], outcome: Outcome) -> None:
        """Forward the calls if they were executed."""
        if type(outcome) is Executed:
            self._counting.ended(calls, outcome)
