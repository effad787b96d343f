"""Prefetch: how many answers are computed ahead of the client's reads."""

from collections import deque
from dataclasses import dataclass, field

from xlaserve.runtime.loaded import Answer
from xlaserve.serving.infer_call import InferCall

_AHEAD_SECONDS = 200e-6
"""Time budget of a thread for further answers: about the cost of one thread hand-off."""
_AHEAD_ANSWERS = 16
_AHEAD_BYTES = 1 << 14
"""Limits of answers computed before checking that the client reads. The client must have read as
many in the previous round.
"""
_SECOND_NS = 1e9


@dataclass(slots=True)
class Computed:
    """The answers that a thread has computed in one go."""

    answers: deque[Answer] = field(default_factory=deque)
    is_done: bool = False
    """Whether the answers are complete and their generator is closed."""
    error: BaseException | None = None
    """The error that ended the answers."""
    has_failed_alone: bool = False
    """Whether the request failed again when retried alone, after a shared execution had failed."""
    size_bytes: int = 0
    """Total bytes of the answers."""

    def add(self, answer: Answer | BaseException) -> None:
        """Append an answer, or record the error that ended them."""
        if isinstance(answer, BaseException):
            self.error = answer
            return
        self.answers.append(answer)
        self.size_bytes += sum(tensor.nbytes for tensor in answer.outputs.values())

    @property
    def is_over(self) -> bool:
        """Tell whether the answers have ended, with a final answer or an error."""
        return self.error is not None or (bool(self.answers) and self.answers[-1].is_last)


class Ahead:
    """Prefetch limit of one request: grows while the client reads, and restarts after a pause."""

    __slots__ = ("_call", "_most")

    def __init__(self, call: InferCall) -> None:
        self._call = call
        self._most = 1

    def grow(self) -> None:
        """Double the limit, since the client has read the previous answers."""
        self._most = min(max(1, 2 * self._most), _AHEAD_ANSWERS)

    def pause(self) -> None:
        """Restart with a limit of one, since the client has stopped reading."""
        self._most = 0

    def allows(self, computed: Computed) -> bool:
        """Tell whether another answer may be computed."""
        is_enough = len(computed.answers) >= self._most or computed.size_bytes >= _AHEAD_BYTES
        return not is_enough and not self._call.has_ended

    @staticmethod
    def until(now_ns: int) -> float:
        """Return the deadline of a thread that starts now, in nanoseconds."""
        return now_ns + _AHEAD_SECONDS * _SECOND_NS
