"""How many answers are computed ahead of a client that reads."""

from collections import deque
from dataclasses import dataclass, field

from xlaserve.runtime.loaded import Answer
from xlaserve.serving.infer_call import InferCall

_AHEAD_SECONDS = 200e-6
"""Seconds that a thread computes further answers of a request: to hand one over takes as long."""
_AHEAD_ANSWERS = 16
_AHEAD_BYTES = 1 << 14
"""The most that is computed before the client is asked whether it reads; it has read as many
before that."""
_SECOND_NS = 1e9


@dataclass(slots=True)
class Computed:
    """The answers that a thread has computed in one go, quick ones several together."""

    answers: deque[Answer] = field(default_factory=deque)
    is_done: bool = False
    """Whether the answers are complete, and closed."""
    error: BaseException | None = None
    """The error that ended them."""
    has_failed_alone: bool = False
    """Whether it failed alone, after a failed shared execution."""
    size_bytes: int = 0
    """Bytes of all of them."""

    def add(self, answer: Answer | BaseException) -> None:
        """Record an answer, or the error that ends them."""
        if isinstance(answer, BaseException):
            self.error = answer
            return
        self.answers.append(answer)
        self.size_bytes += sum(tensor.nbytes for tensor in answer.outputs.values())

    @property
    def is_over(self) -> bool:
        """Tell whether the last answer is final or failed."""
        return self.error is not None or (bool(self.answers) and self.answers[-1].is_last)


class Ahead:
    """Prefetch limit of a request: grows for a reading client, restarts after a pause."""

    __slots__ = ("_call", "_most")

    def __init__(self, call: InferCall) -> None:
        self._call = call
        self._most = 1

    def grow(self) -> None:
        """Allow twice as many: the client has read those before."""
        self._most = min(max(1, 2 * self._most), _AHEAD_ANSWERS)

    def pause(self) -> None:
        """Restart with one, since the client does not read."""
        self._most = 0

    def allows(self, computed: Computed) -> bool:
        """Tell whether another answer may be computed."""
        is_enough = len(computed.answers) >= self._most or computed.size_bytes >= _AHEAD_BYTES
        return not is_enough and not self._call.has_ended

    @staticmethod
    def until(now_ns: int) -> float:
        """Return the deadline of a thread that starts now, in nanoseconds."""
        return now_ns + _AHEAD_SECONDS * _SECOND_NS
