"""Calls of a request with several choices: one nested call per choice."""

from collections.abc import Mapping, Sequence

from xlaserve.errors import Overloaded, QueueTimeout
from xlaserve.errors.access import TooManyRequests
from xlaserve.http.events import EventCall
from xlaserve.serving.answers import answer_last
from xlaserve.serving.call import Headers, Peer
from xlaserve.serving.infer_call import Executed


class ChoiceCall(EventCall):
    """The call of a request for one or several choices, or of one choice."""

    def __init__(
        self, names: Mapping[str, str], headers: Headers, peer: Peer, max_bytes: int
    ) -> None:
        super().__init__(names, headers, peer, max_bytes)
        self._max_bytes_of_parts = max_bytes
        self._parts: Sequence[ChoiceCall] = ()

    def split(self, count: int) -> "Sequence[ChoiceCall]":
        """Return one call per choice: `self` for a single choice, otherwise nested calls."""
        if count == 1:
            return (self,)
        self._parts = [self._part(count) for _ in range(count)]
        return self._parts

    def _part(self, count: int) -> "ChoiceCall":
        # Nested calls share the byte limit of a single call.
        part = ChoiceCall({}, self.headers, self.peer, max(1, self._max_bytes_of_parts // count))
        part.parent, part.principal, part.deadline = self, self.principal, self.deadline
        part.grow = self.grow
        return part

    def fail(self, error: BaseException) -> None:
        """Fail this call and its nested calls; a full queue becomes status 429."""
        if isinstance(error, Overloaded | QueueTimeout):
            error = TooManyRequests(error)
        for part in self._parts:
            part.fail(error)
        super().fail(error)

    def finish(self, now_ns: int) -> None:
        """End the call successfully before the model does, because its response is complete."""
        answer_last(self, Executed({}, self.submitted_ns or self.started_ns, now_ns, self.rows))
