"""A nested call of a decoupled ensemble step, with any number of answers."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from xlaserve.serving.call import NO_HEADERS, NOBODY, Call, Headers, Peer
from xlaserve.serving.infer_call import AwaitedInfer
from xlaserve.serving.inference import InferResponse

_WINDOW = 16
"""Maximum number of queued answers, after which the model must pause."""


class StepAnswers(AwaitedInfer):
    """An inference whose answers a coroutine reads one by one."""

    takes_many = True

    def __init__(
        self,
        headers: Headers = NO_HEADERS,
        peer: Peer = NOBODY,
        deadline: float | None = None,
        *,
        parent: Call | None = None,
    ) -> None:
        super().__init__(headers, peer, deadline, parent=parent)
        self._waiting: deque[InferResponse] = deque()
        self._error: BaseException | None = None
        self._is_last = False
        self._changed = asyncio.Event()

    @property
    def is_writable(self) -> bool:
        """Tell whether another answer may be queued."""
        return len(self._waiting) < _WINDOW

    def write(self, response: InferResponse, *, last: bool) -> None:
        """Queue an answer, unless it is a final one without outputs."""
        self._is_last = last
        if response.outputs:
            self._waiting.append(response)
        self._changed.set()

    def refuse(self, error: BaseException) -> None:
        """Raise an error after the queued answers."""
        self._error = error
        self._changed.set()

    async def answers(self) -> AsyncGenerator[InferResponse, None]:
        """Yield the answers, then raise the model's error, if any; closing cancels the call."""
        try:
            while True:
                while self._waiting:
                    yield self._waiting.popleft()
                    self.resume()
                if self._error is not None:
                    raise self._error
                if self._is_last:
                    return
                self._changed.clear()
                await self._changed.wait()
        finally:
            self.cancel("no caller is waiting for the answers")
